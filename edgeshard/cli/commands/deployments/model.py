"""edgectl model: the contents of the coordinator's store, and whether a model that is not in it
would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import argument, option, switch
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    Output,
    OutputOption,
    human_bytes,
    show_list,
    show_text,
    stderr_console,
)
from edgeshard.cli.render.watch import show
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType, weights_text

if TYPE_CHECKING:
    from rich.console import Console

    from edgeshard.client import Client, StoredModel
    from edgeshard.client.uploads import AddPhase
    from edgeshard.domain.ids import Digest
    from edgeshard.importing.blocks import Width

app = typer.Typer(help="Add models to the coordinator's store.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Add models to the coordinator's store."""


@app.command(
    short_help="Add a model from this disk, the Hugging Face Hub, Ollama or LM Studio to the store."
)
def add(
    context: typer.Context,
    model: Annotated[
        str,
        argument(
            "MODEL",
            "Add this model: DIR or FILE.gguf on this disk, OWNER/NAME[:TAG][@REVISION] on the "
            "Hugging Face Hub (TAG: "
            "a GGUF quantisation), ollama:NAME[:TAG] or lmstudio:NAME.",
        ),
    ],
    name: Annotated[
        str | None, option("NAME", "Store the model under this name (default: from MODEL).")
    ] = None,
    width: Annotated[
        str,
        option(
            "WIDTH",
            "Convert a weight to WIDTH (int8, int4, bfloat16, float16 or float32) if the store has "
            "no exact form for "
            "its source format, such as FP8 or NVFP4.",
        ),
    ] = "int8",
    dry_run: Annotated[
        bool,
        switch(
            "--dry-run",
            "Store nothing. Read only the model's config, and print whether the model fits, which "
            "nodes would hold it, "
            "and the predicted speed.",
        ),
    ] = False,
    cluster: Annotated[
        Path | None,
        option(
            "FILE", "With --dry-run, read nodes and links from this TOML file instead of the site."
        ),
    ] = None,
    source: Annotated[
        str | None,
        option(
            "NODE",
            "With --dry-run, put the first layer on this node (default: the file's source, or the "
            "node with the most "
            "free memory).",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Add a model to the store: read it, hash every tensor and send those that the store lacks. An
    interrupted download or upload resumes. If weights are rounded, the output reports the loss.
    """
    weight_width = chosen_width(width)
    if dry_run:
        _plan_only(context, model, weight_width, cluster, source, output)
    elif cluster is not None or source is not None:
        raise InvalidArgumentError("--cluster and --source go with --dry-run", field="dry_run")
    else:
        from edgeshard.cli.render.views import MODEL_COLUMNS

        stored = ask(context, lambda client: _added(client, model, name, weight_width))
        show_list(stored, output, MODEL_COLUMNS, lambda model: model.name, stored[0])


@app.command(
    name="list",
    short_help="List the models in the store, or with --found the models on this machine.",
)
def list_models(
    context: typer.Context,
    on_disk: Annotated[
        bool,
        switch(
            "--found",
            "List the models that Ollama, LM Studio, the Hugging Face cache and the llama.cpp "
            "cache hold on this "
            "machine, and print whether each fits the site.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the models in the coordinator's store, or with --found the models that other programs
    hold on this machine. The CONTEXT column of --found shows the longest context, in tokens, that
    fits on the site's nodes when one request runs at a time.
    """
    if on_disk:
        from edgeshard.cli.commands.deployments import model_inventory

        model_inventory.show_local(context, output)
    else:
        from edgeshard.cli.render.views import MODEL_COLUMNS

        ask(
            context,
            lambda client: show(
                client.stored_models, output, MODEL_COLUMNS, lambda model: model.name, False
            ),
        )


def chosen_width(text: str) -> Width:
    """Raises InvalidArgumentError for another width than there are."""
    from edgeshard.importing.blocks import Width

    if text not in list(Width):
        raise InvalidArgumentError(
            f"--width {text!r} is unknown: use one of {', '.join(Width)}", field="width"
        )
    return Width(text)


async def _added(client: Client, model: str, name: str | None, width: Width) -> list[StoredModel]:
    digest = await _upload(client, model, name, width)
    stored = [model for model in await client.stored_models() if model.manifest_digest == digest]
    # The same content may have other names; the call was about this one.
    return [model for model in stored if model.name == name] or stored[:1]


@contextmanager
def adding_bars(console: Console) -> Iterator[Callable[[AddPhase, int, int], None]]:
    """A bar for each phase, moved by the returned call; only on a terminal."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    # A log file would get the last line of a bar.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[AddPhase, TaskID] = {}

        def report(phase: AddPhase, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase.value)
            progress.update(bars[phase], completed=done, total=total)

        yield report


def add_model(context: typer.Context, model: str) -> None:
    """Put a model into the store under its own name, and print the progress."""
    ask(context, lambda client: _upload(client, model, None))


async def _upload(
    client: Client, model: str, name: str | None, width: Width | None = None
) -> Digest:
    from edgeshard.client.uploads import Adding

    console = stderr_console()
    with adding_bars(console) as report:

        def note(text: str) -> None:
            console.print(f"note: {text}", markup=False)

        adding = Adding(on_note=note) if width is None else Adding(width, note)
        return await client.add_model(model, name, report, adding)


def _plan_only(
    context: typer.Context,
    model: str,
    width: Width,
    cluster: Path | None,
    source: str | None,
    output: Output,
) -> None:
    """Plan a model by only its config.json, on the site or on the nodes of a file; exits 1 if it
    does not fit."""
    from edgeshard.cli.commands.deployments.plan_inputs import (
        Asked,
        planned_offline,
        unstored_problem,
    )
    from edgeshard.cli.render.plan_views import show_plan
    from edgeshard.importing.imported import notes_of
    from edgeshard.importing.model_sources import parse_source
    from edgeshard.importing.outlook import config_of, further_notes
    from edgeshard.planning.inputs.shapes import model_from_config

    where = parse_source(model)
    config = config_of(where, width)
    spec = model_from_config(where.name, config)
    stored_as, dtype = spec.shape.stored_as, DType.BFLOAT16
    weights = sum(block.weight_bytes(dtype, stored_as) for block in spec.blocks) + spec.head_bytes(
        dtype, stored_as
    )
    weights += spec.embedding_bytes(dtype, stored_as) - spec.shared_bytes(dtype, stored_as)
    show_text(
        f"note: {where.name} is a {spec.shape.architecture} of {spec.parameter_count / 1e6:,.0f} M "
        "parameters; as "
        f"{weights_text(dtype, stored_as)} its weights take {human_bytes(weights)}",
        err=True,
    )
    for note in notes_of(config) + further_notes(where, config):
        show_text(f"note: {note}", err=True)
    options = {} if source is None else {"source": source}
    request = Asked(spec.name, None if cluster is None else stored_as, options)
    if cluster is not None:
        problem, _ = planned_offline(cluster, spec, request)
    else:
        problem, notes = unstored_problem(context, spec, request)
        for note in notes:
            show_text(f"note: {note}", err=True)
    if not show_plan(problem, None, False, output):
        raise typer.Exit(1)
