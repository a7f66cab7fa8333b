"""edgectl profile: have the nodes measure themselves, and the links between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument, switch
from edgeshard.cli.commands.spec_options import quantise_option, spec_option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    TABLES,
    Output,
    OutputOption,
    show_below,
    show_list,
    show_text,
    stderr_console,
)
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from edgeshard.cli.render.profile_views import NodeRow
    from edgeshard.client import Client, NodeProgress
    from edgeshard.domain.nodes.device import Node

DEFAULT_DTYPE = "bfloat16"


def profile(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    nodes: Annotated[
        list[str] | None,
        argument(
            "[NODE]...",
            "Measure these nodes (default: all connected nodes).",
            autocompletion=completion.nodes,
        ),
    ] = None,
    model: Annotated[
        str | None,
        spec_option(
            "model", "Measure for this model of the store; without it, measure links only."
        ),
    ] = None,
    dtype: Annotated[str | None, spec_option("dtype")] = None,
    quantise: Annotated[str | None, quantise_option("--dtype")] = None,
    head_quantisation: Annotated[str | None, spec_option("head_quantisation")] = None,
    quick: Annotated[
        bool, switch("--quick", "Measure fewer points: takes seconds, and is less exact.")
    ] = False,
    again: Annotated[
        bool, switch("--again", "Measure again, even if a stored profile exists.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure the links between nodes and, with --model, how fast each node runs that model.
    `edgectl plan` and `edgectl deploy` use the results. A node measures one layer of each kind with
    random weights. It therefore needs neither the model's files nor memory for the whole model. If
    one node or link fails, the others are still measured.
    """
    from edgeshard.cli.render.profile_views import node_rows
    from edgeshard.domain.models.dtypes import DType, parse_quantisation

    if model is None:
        layer_options = {
            "dtype": dtype,
            "quantise": quantise,
            "head-quantisation": head_quantisation,
            "quick": quick or None,
            "again": again or None,
        }
        _refuse_without_model(layer_options)
    kind = DType.parse(dtype or DEFAULT_DTYPE)
    quantisation = parse_quantisation(quantise, head_quantisation)

    async def work(client: Client) -> tuple[list[NodeRow], list[Node]]:
        progress = client.profile(
            model or "",
            tuple(nodes or ()),
            dtype=kind,
            quick=quick,
            again=again,
            quantisation=quantisation,
        )
        outcomes = await _outcomes(progress)
        site = await client.site(model or "")
        rows = node_rows(site, outcomes, site.profiles_of(kind, quantisation))
        return rows, [node for node in site.nodes if str(node.name) in outcomes]

    rows, measured = ask(context, work)
    _show(rows, model is not None, output)
    if model is not None and output in TABLES:
        show_kernels(measured)
    if any(row.failure is not None or row.missed for row in rows):
        raise typer.Exit(1)


def _refuse_without_model(layer_options: Mapping[str, object]) -> None:
    """Raise InvalidArgumentError for the first option that has a value."""
    for option, value in layer_options.items():
        if value is not None:
            raise InvalidArgumentError(
                f"--{option} is about measuring for a model: give --model too", field=option
            )


def show_kernels(nodes: Sequence[Node]) -> None:
    """Print the kernels of nodes, and warnings, to standard error."""
    from edgeshard.cli.render.kernel_views import kernel_lines, kernel_warnings

    for line in (*kernel_lines(nodes), *kernel_warnings(nodes)):
        show_text(line, err=True)


async def _outcomes(progress: AsyncGenerator[NodeProgress, None]) -> dict[str, NodeProgress]:
    """The last word of each node."""
    import asyncio

    outcomes: dict[str, NodeProgress] = {}
    with progress_on(stderr_console()) as reporter:
        try:
            async with aclosing(progress) as events:
                async for event in events:
                    outcomes[event.node] = event
                    reporter.show(event)
        except asyncio.CancelledError:
            reporter.console.print(
                "the nodes continue to measure and end by themselves: `edgectl describe node NODE` "
                "shows the "
                "results; to stop a node, restart its agent",
                markup=False,
            )
            raise
    return outcomes


class ProfileReporter:
    """Prints on `console` the progress of each node: a line now and then, or a bar for each if
    `bars` is a live display."""

    def __init__(self, console: Console, bars: Progress | None) -> None:
        self.console = console
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    def show(self, event: NodeProgress) -> None:
        if self._bars is not None:
            task = self._tasks.get(event.node)
            if task is None:
                task = self._tasks[event.node] = self._bars.add_task(
                    event.node, total=None, what=""
                )
            what = _outcome(event) if event.finished else escaped(event.what)
            self._bars.update(task, completed=event.done, total=event.total or None, what=what)
        elif event.finished:
            self._print(f"{event.node}: {_outcome(event)}")
        elif self._is_news(event):
            done = f"{event.done} of {event.total}, " if event.total else ""
            self._print(f"{event.node}: {done}{event.what}")
        if event.missed:
            links = ", ".join(f"{event.node} -> {name}" for name in event.missed)
            self._print(f"not measured: {links}; see the log of {event.node}")

    def _is_news(self, event: NodeProgress) -> bool:
        """Whether another tenth is done: a log wants no line for every figure."""
        tenth = 10 * event.done // max(1, event.total)
        last_tenth = self._tenths.get(event.node)
        self._tenths[event.node] = tenth
        return last_tenth != tenth

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)


@contextmanager
def progress_on(console: Console) -> Iterator[ProfileReporter]:
    """A reporter with live bars if the console is a terminal."""
    if not console.is_terminal:
        yield ProfileReporter(console, None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name = TextColumn("{task.description}", markup=False)
    what = TextColumn("{task.fields[what]}", markup=False)
    with Progress(
        name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), what, console=console
    ) as bars:
        yield ProfileReporter(console, bars)


def _outcome(event: NodeProgress) -> str:
    return "measured" if event.failure is None else f"failed: {escaped(event.failure.message)}"


def _show(rows: list[NodeRow], with_model: bool, output: Output) -> None:
    from edgeshard.cli.render.profile_views import (
        LINK_COLUMNS,
        LINKS_ONLY_COLUMNS,
        NODE_COLUMNS,
        long_results,
    )

    columns: list[Any] = NODE_COLUMNS if with_model else LINKS_ONLY_COLUMNS
    show_list(rows, output, columns, lambda row: row.node, [row.as_data() for row in rows])
    if output in TABLES:
        if below := list(long_results(rows)):
            show_text("\n".join(["", *below]))
        show_below([link for row in rows for link in row.links], LINK_COLUMNS, output)
