"""edgectl bench: a load on a deployment, and how quickly it answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import argument, option, with_option_groups
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    TABLES,
    Output,
    OutputOption,
    show_below,
    show_fields,
    show_text,
    show_value,
    stderr_console,
    writing,
)
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from edgeshard.cli.commands.requests.bench_load import LengthRange, Loading, OfferedLoad
    from edgeshard.client import Client
    from edgeshard.domain.control.site import ServedModel

    _Wanted = tuple[LengthRange | Sequence[str] | None, LengthRange | None]
    """Prompts and answers of a load; None if the request sets none."""

PROMPT_TOKENS, NEW_TOKENS = 128, 64
"""The defaults, or less if the context is smaller."""
_LESS = "or fewer if the context is short"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options that define the load."""

    rate: Annotated[
        float | None,
        option(
            "N",
            "Start N requests a second, even if earlier ones are still running.",
            min=0.001,
            max=10_000,
        ),
    ] = None
    concurrency: Annotated[
        int | None, option("N", "Keep N requests running (default: 1).", min=1, max=4096)
    ] = None
    requests: Annotated[int, option("N", "Send at most N requests.", min=1, max=100_000)] = 32
    duration: Annotated[
        float, option("SECONDS", "Start no request after SECONDS.", min=0.1, max=86_400)
    ] = 60.0
    prompt_tokens: Annotated[
        str | None,
        option(
            "N|LOW:HIGH",
            f"Draw prompts of N tokens, or of LOW to HIGH tokens (default: {PROMPT_TOKENS}, "
            f"{_LESS}).",
        ),
    ] = None
    new_tokens: Annotated[
        str | None,
        option(
            "N|LOW:HIGH",
            f"Generate N tokens per answer, or LOW to HIGH tokens (default: {NEW_TOKENS}, "
            f"{_LESS}).",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        option(
            "FILE",
            'Read prompts from this file instead: one per line, or JSON lines with "prompt".',
        ),
    ] = None
    seed: Annotated[
        int,
        option("N", "Set the random seed. The same seed gives the same prompts and start times."),
    ] = 0

    def load(self) -> OfferedLoad:
        """Raises InvalidArgumentError for options that do not go together."""
        from edgeshard.cli.commands.requests.bench_load import OfferedLoad

        if self.rate is not None and self.concurrency is not None:
            raise InvalidArgumentError("give one of --rate and --concurrency", field="rate")
        if self.prompts is not None and self.prompt_tokens is not None:
            raise InvalidArgumentError("give one of --prompts and --prompt-tokens", field="prompts")
        return OfferedLoad(self.requests, self.duration, self.rate, self.concurrency or 1)

    def wanted(self) -> _Wanted:
        prompts = (
            _parsed(self.prompt_tokens, "prompt-tokens")
            if self.prompts is None
            else _read(self.prompts)
        )
        return prompts, _parsed(self.new_tokens, "new-tokens")


@with_option_groups
def bench(
    context: typer.Context,
    *,
    deployment: Annotated[
        str, argument("[DEPLOYMENT]", "Use this deployment; optional if the site has only one.")
    ] = "",
    options: LoadOptions,
    slo_ttft: Annotated[
        float | None,
        option(
            "SECONDS",
            "Count an answer as good only if its time to first token (TTFT) is at most SECONDS.",
            min=0,
        ),
    ] = None,
    slo_itl: Annotated[
        float | None,
        option(
            "SECONDS",
            "Count an answer as good only if its mean inter-token latency (ITL) is at most "
            "SECONDS.",
            min=0,
        ),
    ] = None,
    timeout: Annotated[
        float, option("SECONDS", "Cancel a request after SECONDS.", min=0.1)
    ] = 120.0,
    picture: Annotated[
        Path | None, option("FILE.svg", "Draw the distribution of token latencies into this file.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send test requests to a deployment and measure its latency. Give either --rate or
    --concurrency, not both. By default, prompts are random tokens. Their lengths are therefore
    exact, and a prompt cache cannot help. An answer does not stop at an end-of-text token, so its
    length is exact, too. The first request is a warm-up. Ctrl-C ends the run early and prints the
    results so far.
    """
    from edgeshard.cli.render import bench_report
    from edgeshard.cli.render.svg import check_matplotlib

    load = options.load()
    if picture is not None and picture.suffix != ".svg":
        raise InvalidArgumentError(f"--picture {picture}: end the name in .svg", field="picture")
    if picture is not None:
        check_matplotlib()
    workload = options.wanted()
    name, loading = ask(
        context, lambda client: _measured(client, load, options.seed, workload, deployment, timeout)
    )
    goal = bench_report.Goal(slo_ttft, slo_itl)
    report = bench_report.report(
        name, str(load), options.seed, loading.served, loading.unfinished, goal
    )
    if picture is not None:
        _write(picture, bench_report.picture(report, loading.served))
    _show(report, output)
    if loading.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.answered:
        raise typer.Exit(1)


async def _measured(
    client: Client,
    load: OfferedLoad,
    seed: int,
    workload: _Wanted,
    deployment: str,
    timeout_s: float,
) -> tuple[str, Loading]:
    """The deployment's name, and the result of the load."""
    from edgeshard.cli.commands.requests.bench_load import LengthRange, drawn, put_on, served
    from edgeshard.process.clock import SystemClock

    clock = SystemClock()
    served_model = await _chosen(client, deployment)
    room = served_model.max_context or PROMPT_TOKENS + NEW_TOKENS
    prompts, answers = workload
    if prompts is None:
        prompts = LengthRange(*(min(PROMPT_TOKENS, max(1, room // 2)),) * 2)
    if answers is None:
        left = room - (prompts.high if isinstance(prompts, LengthRange) else room // 2)
        answers = LengthRange(*(max(1, min(NEW_TOKENS, left)),) * 2)
    if isinstance(prompts, LengthRange) and prompts.high + answers.high > room:
        raise InvalidArgumentError(
            f"--prompt-tokens: {prompts.high} tokens in and {answers.high} out exceed the {room} "
            "that deployment "
            f"{served_model.deployment} takes together; give fewer",
            field="prompt-tokens",
        )
    requests = drawn(seed, prompts, answers)
    first = await served(client, served_model.deployment, next(requests), 0.0, timeout_s, clock)
    if first.error:
        raise FailedPreconditionError(
            f"deployment {served_model.deployment} did not answer the warm-up request "
            f"({first.error}): run "
            f"edgectl generate {served_model.deployment} to see why",
            reason=first.error,
        )
    with stderr_console().status("") as line:

        def told(so_far: Loading) -> None:
            line.update(f"{len(so_far.served)} of {load.requests} requests")

        loading = await put_on(
            load,
            requests,
            seed,
            lambda request, began: served(
                client, served_model.deployment, request, began, timeout_s, clock
            ),
            clock,
            told,
        )
    return served_model.deployment, loading


async def _chosen(client: Client, name: str) -> ServedModel:
    """By a deployment's name, or a model's; without one the only deployment there is."""
    models = await client.served_models()
    matches = [model for model in models if name in ("", model.deployment, model.model)]
    exact = [model for model in matches if model.deployment == name]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    names = ", ".join(model.deployment for model in models) or "none"
    if name and not matches:
        raise NotFoundError(
            f"deployment {name} answers no requests; those that do: {names}", field="deployment"
        )
    raise InvalidArgumentError(
        f"name a deployment; those that answer requests: {names}", field="deployment"
    )


def _parsed(text: str | None, option: str) -> LengthRange | None:
    from edgeshard.cli.commands.requests.bench_load import LengthRange

    return None if text is None else LengthRange.parse(text, option)


def _read(path: Path) -> list[str]:
    """The prompts of a file. Raises InvalidArgumentError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgumentError(f"--prompts {path}: {why}", field="prompts") from None
    prompts = [_prompt(line) for line in lines]
    if not prompts:
        raise InvalidArgumentError(f"--prompts {path} holds no prompt", field="prompts")
    return prompts


def _prompt(line: str) -> str:
    """The prompt of a line of text, or of a JSON object's "prompt"."""
    if line.startswith("{"):
        try:
            values: Any = json.loads(line)
        except ValueError:
            return line
        if isinstance(values, dict) and isinstance(values.get("prompt"), str) and values["prompt"]:
            return str(values["prompt"])
    return line


def _show(report: Any, output: Output) -> None:
    from edgeshard.cli.render.bench_report import SPREAD_COLUMNS, fields, rows

    if output not in TABLES:
        show_value(report, output, [report.deployment])
        return
    show_fields(fields(report))
    show_below(rows(report), SPREAD_COLUMNS)


def _write(path: Path, text: str) -> None:
    if not text:
        show_text(f"--picture {path}: no token arrived, so nothing is drawn", err=True)
        return
    with writing("--picture", path):
        path.write_text(text, encoding="utf-8")
