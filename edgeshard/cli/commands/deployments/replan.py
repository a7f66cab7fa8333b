"""edgectl replan: move a running deployment to the nodes that are there now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import argument, switch, wait_timeout
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    OutputOption,
    human_seconds,
    plain,
    show_fields,
    show_list,
    show_text,
    stderr_console,
)
from edgeshard.domain.errors import EdgeShardError

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.control.site import ReplanResult
    from edgeshard.domain.deployments.placement import Placement, Prediction


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A node's layers now and then, "-" for none."""

    node: str
    now: str
    then: str


_COLUMNS: list[Column[LayerChange]] = [
    Column("NODE", lambda share: share.node),
    Column("LAYERS NOW", lambda share: share.now),
    Column("THEN", lambda share: share.then),
]


def replan(
    context: typer.Context,
    name: Annotated[str, argument("NAME", "Move the deployment of this name.")],
    dry_run: Annotated[
        bool, switch("--dry-run", "Print what would change, and change nothing.")
    ] = False,
    force: Annotated[
        bool, switch("--force", "Move it even if the gain is small or unknown.")
    ] = False,
    wait: Annotated[
        bool, switch("--wait/--no-wait", "Wait until the deployment is ready again.")
    ] = True,
    timeout: Annotated[float | None, wait_timeout("the move continues")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a running deployment for the site's current nodes, and move it if it gains 5 % or more.
    Running requests pause and continue with their next token. A deployment that was placed by hand
    with --layers cannot move. The replicas of a name are planned and moved one after the other.
    """
    plans = ask(context, lambda client: _replanned(client, name, dry_run, force, wait, timeout))
    if output not in TABLES:
        rows = [share for outcome in plans.values() for share in shares(outcome)]
        data = [{"changed": outcome.changed, **plain(outcome)} for outcome in plans.values()]
        show_list(
            rows, output, _COLUMNS, lambda share: share.node, data[0] if len(data) == 1 else data
        )
        return
    for number, (each, outcome) in enumerate(plans.items()):
        show_text("\n" * (number > 0), nl=False)
        show_list(shares(outcome), output, _COLUMNS, lambda share: share.node)
        show_text()
        show_fields(_figures(outcome))
        show_text()
        show_text(sentence(each, outcome, wait=wait))


async def _replanned(
    client: Client, name: str, dry_run: bool, force: bool, wait: bool, timeout_s: float | None
) -> dict[str, ReplanResult]:
    """The outcome for a deployment, or for each replica of a name. Raises as `Client.replan`;
    outcomes so far are printed then."""
    from edgeshard.cli.render.loading import DeployReporter

    done: dict[str, ReplanResult] = {}
    try:
        for each in [one.spec.name for one in await client.replicas(name)]:
            with stderr_console().status(f"planning {each}") as status:
                on_change = DeployReporter(status).show
                done[each] = await client.replan(
                    each,
                    dry_run=dry_run,
                    force=force,
                    wait=wait,
                    timeout_s=timeout_s,
                    on_change=on_change,
                )
    except EdgeShardError:
        for each, outcome in done.items():
            show_text(sentence(each, outcome, wait=wait), err=True)
        raise
    return done


def shares(outcome: ReplanResult) -> list[LayerChange]:
    """A row for each node of either placement: present nodes first, then new ones."""
    now, then = (_layers(placement) for placement in (outcome.current, outcome.found))
    return [
        LayerChange(node, now.get(node, "-"), then.get(node, "-"))
        for node in dict.fromkeys([*now, *then])
    ]


def _layers(placement: Placement) -> dict[str, str]:
    return {str(stage.node_name): str(stage.layers) for stage in placement.stages}


def _figures(outcome: ReplanResult) -> dict[str, str]:
    from edgeshard.cli.render.views import lengths_text

    fields = {"Now": _rates(outcome.expected), "Then": _rates(outcome.found.predicted)}
    if outcome.gain is not None and outcome.expected is not None:
        fields["Gain"] = (
            f"{100 * outcome.gain:.1f} % ({outcome.expected.objective}, "
            f"{lengths_text(outcome.expected)})"
        )
    return fields | ({"Note": outcome.note} if outcome.note else {})


def _rates(predicted: Prediction | None) -> str:
    if predicted is None:
        return "not predicted"
    return (
        f"{predicted.throughput_tps:.2f} tokens/s, {human_seconds(predicted.time_per_token_s)} "
        "per token"
    )


def sentence_of_gain(outcome: ReplanResult) -> str:
    """Such as `41 % more tokens/s (62.1 instead of 44.0)`."""
    now, then = outcome.expected, outcome.found.predicted
    if now is None or then is None or outcome.gain is None:
        return "an unknown gain"
    if now.objective == "throughput":
        return (
            f"{100 * outcome.gain:.0f} % more tokens/s ({then.throughput_tps:.1f} instead of "
            f"{now.throughput_tps:.1f})"
        )
    times = (
        f"{human_seconds(then.time_per_token_s)} per token instead of "
        f"{human_seconds(now.time_per_token_s)}"
    )
    return f"{100 * outcome.gain:.0f} % less time ({times})"


def sentence(name: str, outcome: ReplanResult, *, wait: bool) -> str:
    """The outcome in one sentence."""
    from edgeshard.cli.render.views import layers_text
    from edgeshard.domain.control.site import ReplanReason

    then = layers_text(outcome.found)
    match outcome.reason:
        case ReplanReason.MOVED:
            return f"{name} {'moved' if wait else 'moves'} to {then}."
        case ReplanReason.WOULD_MOVE:
            return f"{name} would move to {then}; nothing was changed."
        case ReplanReason.SAME_LAYERS:
            return f"{name} stays: its placement is the best one for the current nodes."
        case ReplanReason.SMALL_GAIN:
            return f"{name} stays: a move would gain less than 5 %. --force moves it all the same."
        case ReplanReason.NOT_WEIGHED:
            return f"{name} stays: the gain of a move is unknown. --force moves it anyway."
        case ReplanReason.NOTHING_NEW:
            return f"{name} stays: nodes, links and profiles are those that it was planned for."
