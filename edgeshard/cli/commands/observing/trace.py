"""edgectl trace: record the actions of every node of a deployment in each step, and show how they
spend the time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    print_table,
    show_below,
    show_text,
    stderr_console,
    table,
    writing,
)
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.requests.trace import StageTrace

STDOUT = Path("-")


def trace(
    context: typer.Context,
    deployment: Annotated[
        str,
        argument("DEPLOYMENT", "Record this deployment.", autocompletion=completion.deployments),
    ],
    seconds: Annotated[float, option("SECONDS", "Record for SECONDS, 0.1 to 60.")] = 5.0,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Write FILE.json (for ui.perfetto.dev) or FILE.svg (a picture of some steps); - writes "
            "JSON to stdout.",
            "--output",
            "-o",
        ),
    ] = None,
) -> None:
    """Record a deployment's steps on all its nodes and print where the time goes. Send requests
    meanwhile: only steps that run during the recording are seen. The table shows, for each node,
    the time spent computing, the time spent sending without computing, and the idle time (bubbles).
    A node that reads weights from disk has a row in a second table for that time. If the deployment
    speculates, a further row for its first node shows the accepted draft tokens. The nodes' clocks
    need not agree. If the deployment has replicas, all ready replicas are recorded. A file of -o
    holds only one of them: name that replica, such as tales.1.
    """
    from edgeshard.domain.requests.trace import check_seconds

    check_seconds(seconds)
    _check_output(output)
    recorded = ask(context, lambda client: _recorded(client, deployment, seconds, output))
    ran = {
        name: traces for name, traces in recorded.items() if any(stage.records for stage in traces)
    }
    if not ran:
        raise FailedPreconditionError(
            f"no step of {deployment} ran in these {seconds:g} s; send requests meanwhile",
            reason="NOTHING_RAN",
        )
    for number, (name, traces) in enumerate(ran.items()):
        if len(recorded) > 1:
            show_text("\n" * (number > 0) + f"{name}:")
        _show(name, traces, output)


async def _recorded(
    client: Client, deployment: str, seconds: float, output: Path | None
) -> dict[str, tuple[StageTrace, ...]]:
    """The aligned traces of a deployment, or of each replica of a name that is ready. Raises as
    `Client.trace` if there is none."""
    import asyncio

    from edgeshard.domain.deployments.deployment import DeploymentPhase
    from edgeshard.domain.requests.trace import aligned

    replicas = await client.replicas(deployment)
    if len(replicas) > 1 and output is not None:
        each = ", ".join(one.spec.name for one in replicas)
        raise InvalidArgumentError(
            f"--output {output}: a file is of one replica, and {deployment} has {len(replicas)}; "
            f"name one of {each}",
            field="output",
        )
    ready = [one for one in replicas if one.phase is DeploymentPhase.READY] or replicas[:1]
    names = [one.spec.name for one in ready]
    traces = await asyncio.gather(*(client.trace(name, seconds) for name in names))
    return {name: aligned(stages) for name, stages in zip(names, traces, strict=True)}


def _show(deployment: str, traces: tuple[StageTrace, ...], output: Path | None) -> None:
    from edgeshard.cli.render.trace_views import (
        GUESS_COLUMNS,
        READ_COLUMNS,
        SUMMARY_COLUMNS,
        picture,
    )
    from edgeshard.domain.requests.trace import (
        perfetto,
        summarised,
        summarised_guesses,
        summarised_reads,
    )

    steps = summarised(traces)
    reads = summarised_reads(traces)
    guesses = summarised_guesses(traces)
    if output == STDOUT:
        show_text(perfetto(traces, deployment))
        stderr_console().print(table(steps, SUMMARY_COLUMNS))
        if reads:
            stderr_console().print(table(reads, READ_COLUMNS))
        if guesses:
            stderr_console().print(table(guesses, GUESS_COLUMNS))
        return
    if output is not None:
        _write(
            output,
            picture(traces, deployment)
            if output.suffix == ".svg"
            else perfetto(traces, deployment),
        )
    print_table(table(steps, SUMMARY_COLUMNS))
    show_below(reads, READ_COLUMNS)
    show_below(guesses, GUESS_COLUMNS)


def _check_output(path: Path | None) -> None:
    """Check before the user waits for a trace that could not be saved."""
    if path is None or path == STDOUT:
        return
    if path.suffix not in (".json", ".svg"):
        raise InvalidArgumentError(
            f"--output {path}: end the name in .json (for ui.perfetto.dev) or .svg (a picture), or "
            "give - for JSON on "
            "stdout",
            field="output",
        )
    if not path.parent.is_dir():
        raise InvalidArgumentError(
            f"cannot write --output {path}: there is no such directory", field="output"
        )
    if path.suffix == ".svg":
        from edgeshard.cli.render.svg import check_matplotlib

        check_matplotlib()


def _write(path: Path, text: str) -> None:
    from edgeshard.process.private import open_private

    with writing("--output", path), open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
