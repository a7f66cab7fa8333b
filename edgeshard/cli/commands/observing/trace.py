"""edgectl trace: record what every node of a deployment does in each step, and show where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.options import argument, option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import print_table, show_below, stderr_console, table, writing
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError

STDOUT = Path("-")


def trace(
    context: typer.Context,
    deployment: Annotated[str, argument("DEPLOYMENT", "What to record.", autocompletion=completion.deployments)],
    seconds: Annotated[float, option("SECONDS", "For how long, from 0.1 to 60.")] = 5.0,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Write FILE.json (for ui.perfetto.dev) or FILE.svg (a picture of some steps); - is JSON on stdout.",
            "--output",
            "-o",
        ),
    ] = None,
) -> None:
    """Record a deployment's steps, on all its nodes at once, and print where their time goes.

    Only steps that run meanwhile are seen, so send requests. Of the recorded time a node was computing, sending while
    it had nothing to compute, or idle (the bubbles). Nodes with weights on their disks have a row of their own for what
    they read. The clocks of the nodes need not agree.
    """
    from edgeshard.cli.render.trace_views import READ_COLUMNS, SUMMARY_COLUMNS, picture
    from edgeshard.domain.requests.trace import aligned, check_seconds, perfetto, summarised, summarised_reads

    check_seconds(seconds)
    _check_output(output)
    traces = aligned(ask(context, lambda client: client.trace(deployment, seconds)))
    if not any(stage.records for stage in traces):
        raise FailedPreconditionError(
            f"no step of {deployment} ran in these {seconds:g} s; send requests meanwhile", reason="NOTHING_RAN"
        )
    steps, reads = table(summarised(traces), SUMMARY_COLUMNS), summarised_reads(traces)
    if output == STDOUT:
        typer.echo(perfetto(traces, deployment))
        for shown in (steps, *([table(reads, READ_COLUMNS)] if reads else [])):
            stderr_console().print(shown)
        return
    if output is not None:
        _write(output, picture(traces, deployment) if output.suffix == ".svg" else perfetto(traces, deployment))
    print_table(steps)
    show_below(reads, READ_COLUMNS)


def _check_output(path: Path | None) -> None:
    """Before anybody waits for a trace that could not be kept."""
    if path is None or path == STDOUT:
        return
    if path.suffix not in (".json", ".svg"):
        raise InvalidArgumentError(
            f"--output {path}: end the name in .json (for ui.perfetto.dev) or .svg (a picture), or give - for JSON on "
            "stdout",
            field="output",
        )
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"cannot write --output {path}: there is no such directory", field="output")
    if path.suffix == ".svg":
        from edgeshard.cli.render.svg import check_matplotlib

        check_matplotlib()


def _write(path: Path, text: str) -> None:
    from edgeshard.process.private import open_private

    with writing("--output", path), open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
