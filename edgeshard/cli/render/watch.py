"""Lists that stay: a line for each item, and another one whenever that changes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Generic, TypeVar

import typer

from edgeshard.cli.render.output import (
    Column,
    Output,
    json_text,
    plain,
    show_list,
    show_text,
    visible,
)
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import escaped

Item = TypeVar("Item")

WatchOption = Annotated[
    bool, typer.Option("--watch", "-w", help="Keep printing changes until Ctrl-C.")
]
INTERVAL_S = 1.0
"""Between two snapshots. Nodes' reports change all the time, without an event of the coordinator
for each."""


async def show(
    fetch: Callable[[], Awaitable[Sequence[Item]]],
    output: Output,
    columns: Sequence[Column[Item]],
    name: Callable[[Item], str],
    watched: bool,
) -> None:
    """Print a list, once or whenever its table changes."""
    if not watched:
        show_list(await fetch(), output, columns, name)
        return
    check_lines(output)
    changes = Changes(columns, name)
    rows = Rows(visible(columns, output))
    while True:
        for item in changes.of(await fetch()):
            print_item(item, output, rows, name)
        for item_name in changes.gone:
            show_text(f"{item_name} is gone", err=True)
        sys.stdout.flush()
        await asyncio.sleep(INTERVAL_S)


async def follow(
    items: AsyncGenerator[Item, None],
    output: Output,
    columns: Sequence[Column[Item]],
    name: Callable[[Item], str],
) -> None:
    """Print a line for each item as it arrives, until the stream ends or is left."""
    check_lines(output)
    rows = Rows(columns)
    async with aclosing(items) as stream:
        async for item in stream:
            print_item(item, output, rows, name)
            sys.stdout.flush()


def check_lines(output: Output) -> None:
    """Raise InvalidArgumentError for a form that is not one of lines."""
    if output is Output.YAML:
        raise InvalidArgumentError(
            "--watch prints a line for each change: give -o json, or no -o", field="output"
        )


def print_item(item: Item, output: Output, rows: Rows[Item], name: Callable[[Item], str]) -> None:
    """Print one of many items that arrive one by one; JSON as an object a line."""
    match output:
        case Output.JSON:
            show_text(json_text(plain(item)))
        case Output.NAME:
            show_text(name(item))
        case _:
            for line in rows.lines(item):
                show_text(line)


class Changes(Generic[Item]):
    """Items that are new or differ, by the table's columns without `-o wide`, where times run."""

    def __init__(self, columns: Sequence[Column[Item]], name: Callable[[Item], str]) -> None:
        self._columns = [column for column in columns if not column.wide]
        self._name = name
        self._shown: dict[str, list[str]] = {}
        self.gone: list[str] = []

    def of(self, items: Sequence[Item]) -> list[Item]:
        cells = {
            self._name(item): [column.cell(item) for column in self._columns] for item in items
        }
        self.gone = [name for name in self._shown if name not in cells]
        changed = [
            item for item in items if self._shown.get(self._name(item)) != cells[self._name(item)]
        ]
        self._shown = cells
        return changed


class Rows(Generic[Item]):
    """A table whose rows arrive one by one: a column is as wide as its widest cell so far."""

    def __init__(self, columns: Sequence[Column[Item]]) -> None:
        self._columns = columns
        self._widths = [len(column.title) for column in columns]
        self._begun = False

    def lines(self, item: Item) -> list[str]:
        cells = [escaped(column.cell(item)) for column in self._columns]
        self._widths = [
            max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)
        ]
        heading = [] if self._begun else [self._line([column.title for column in self._columns])]
        self._begun = True
        return [*heading, self._line(cells)]

    def _line(self, cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if column.right else cell.ljust(width)
            for column, cell, width in zip(self._columns, cells, self._widths, strict=True)
        )
        return "  ".join(aligned).rstrip()
