"""The live view of `edgectl top`: one screen of tables that are read again every second."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Static

from edgeshard.cli.render.top_rows import SHAPES, Row, TableShape, summary, tables
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import escaped
from edgeshard.views import Look

Table = DataTable[Text]
LOOKS = 4
"""Rates are since the oldest of this many snapshots: nodes report about once a second."""


class TopView(App[None]):
    """`look` reads the site, every `interval_s` seconds; `target` is shown as whose it is.

    If it cannot be read, the view shows the reason, keeps its content, and continues.
    """

    CSS = """
    #status { height: 1; padding: 0 1; background: $panel; }
    .title { height: 1; padding: 0 1; text-style: bold; margin-top: 1; }
    DataTable { height: auto; max-height: 14; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "stand_still", "Pause"),
        Binding("tab", "app.focus_next", "Next table"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, look: Callable[[], Awaitable[Look]], target: str, interval_s: float) -> None:
        super().__init__()
        self._look = look
        self._target = target
        self._interval_s = interval_s
        self._looks: deque[Look] = deque(maxlen=LOOKS)
        self._stands_still = False

    def compose(self) -> ComposeResult:
        yield Static(f"{self._target}: reading", id="status", markup=False)
        with VerticalScroll(can_focus=False):
            for shape in SHAPES:
                yield Static(shape.title, classes="title", markup=False)
                yield DataTable[Text](id=shape.title.lower(), cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        for shape in SHAPES:
            for column in shape.columns:
                self._table(shape).add_column(
                    Text(column.title, justify="right" if column.right else "left")
                )
        self.query_one(f"#{SHAPES[0].title.lower()}").focus()
        self.run_worker(self._keep_looking(), exit_on_error=True)

    async def _keep_looking(self) -> None:
        while True:
            if not self._stands_still:
                await self._read()
            await asyncio.sleep(self._interval_s)

    async def _read(self) -> None:
        try:
            now = await self._look()
        except EdgeShardError as error:
            self._say(error.message)
            return
        self._say(summary(now))
        for shape, rows in zip(
            SHAPES, tables(now, self._looks[0] if self._looks else None), strict=True
        ):
            _fill(self._table(shape), shape, rows)
        self._looks.append(now)

    def action_stand_still(self) -> None:
        self._stands_still = not self._stands_still
        if self._looks:
            self._say(summary(self._looks[-1]))

    def _say(self, words: str) -> None:
        paused = " (paused; p resumes)" if self._stands_still else ""
        self.query_one("#status", Static).update(Text(escaped(f"{self._target}: {words}{paused}")))

    def _table(self, shape: TableShape) -> Table:
        table: Table = self.query_one(f"#{shape.title.lower()}", DataTable)
        return table


def _fill(table: Table, shape: TableShape, rows: list[Row]) -> None:
    """Fill cell by cell, so that the cursor and the scroll position stay."""
    while table.row_count > len(rows):
        table.remove_row(table.coordinate_to_cell_key(Coordinate(table.row_count - 1, 0)).row_key)
    for number, row in enumerate(rows):
        cells = [
            Text(escaped(column.cell(row)), justify="right" if column.right else "left")
            for column in shape.columns
        ]
        if number >= table.row_count:
            table.add_row(*cells)
            continue
        for at, cell in enumerate(cells):
            place = Coordinate(number, at)
            if table.get_cell_at(place) != cell:
                table.update_cell_at(place, cell, update_width=True)
