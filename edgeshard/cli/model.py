"""edgectl model: what goes into the coordinator's store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.connect import Connect, connect_of, run
from edgeshard.cli.output import Output, OutputOption, plain, show_data, show_list, stderr_console

if TYPE_CHECKING:
    from edgeshard.domain.ids import Digest

app = typer.Typer(help="Put models into the coordinator's store.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Put models into the coordinator's store."""


@app.command(short_help="Put a local model into the store.")
def add(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A Hugging Face model directory.")
    ],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Its name in the store; by default DIR's.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Register a local model: hash every tensor and send what the store lacks.

    An interrupted upload goes on where it stopped.
    """
    run(_add(connect_of(context), directory.resolve(), name, output))


async def _add(connect: Connect, directory: Path, name: str | None, output: Output) -> None:
    from edgeshard.cli.views import MODEL_COLUMNS

    digest = await _upload(connect, directory, name)
    async with connect.client() as client:
        stored = [model for model in await client.stored_models() if model.manifest_digest == digest]
    # The same content may have other names; the call was about this one.
    stored = [model for model in stored if model.name == name] or stored[:1]
    if output in (Output.JSON, Output.YAML):
        show_data(plain(stored[0]), output)
    else:
        show_list(stored, output, MODEL_COLUMNS, lambda model: model.name)


def add_model(connect: Connect, directory: Path) -> None:
    """Put a model into the store under its directory's name, and say how far that is."""
    run(_upload(connect, directory, None))


async def _upload(connect: Connect, directory: Path, name: str | None) -> Digest:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from edgeshard.client.models import AddPhase

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    console = stderr_console()
    # A log file gets the last line of a bar at most; the bar itself is for terminals.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {AddPhase.HASHING: progress.add_task("hashing", total=None)}

        def report(phase: AddPhase, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task("uploading")
            progress.update(bars[phase], completed=done, total=total)

        async with connect.client() as client:
            return await client.add_model(directory, name, report)
