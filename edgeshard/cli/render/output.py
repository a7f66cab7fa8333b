"""Values to text: tables for people, JSON, YAML and names for programs. Data goes to stdout, the
rest to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import escaped
from edgeshard.domain.models.model import LayerRange
from edgeshard.forms import Forms, field_names, is_object

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

Item = TypeVar("Item")
OWN_LINES = "\n\t"
"""Characters that `escaped` keeps in texts of several lines."""
_ANY_WIDTH = 1000
_FOLDS_FROM = 80


class Output(StrEnum):
    """Forms of `-o` on reading commands."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


TABLES = (Output.TABLE, Output.WIDE)
"""Forms for people."""
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Choose the output format.")]


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A table's column: its title, its text for an item, and whether it is for `-o wide` only."""

    title: str
    cell: Callable[[Item], str]
    wide: bool = False
    right: bool = False


def show_text(text: str = "", *, err: bool = False, nl: bool = True, dim: bool = False) -> None:
    """Print a text to stdout, or to stderr. It may quote a node, a client or a coordinator: what
    steers a terminal is shown as an escape. Every line that a command prints goes through here or
    through a console of this module."""
    safe_text = escaped(text, OWN_LINES)
    typer.echo(typer.style(safe_text, dim=True) if dim else safe_text, err=err, nl=nl)


def show_list(
    items: Sequence[Item],
    output: Output,
    columns: Sequence[Column[Item]],
    name: Callable[[Item], str],
    data: Any = None,
) -> None:
    """Print a list to stdout as `output` asks: a JSON or YAML array, one name a line, or a table.

    `data` is what JSON and YAML show in place of the items.
    """
    if output not in TABLES:
        show_value(items if data is None else data, output, map(name, items))
    elif not items:
        show_text("none", err=True)
    else:
        print_table(table(items, visible(columns, output)), wide=output is Output.WIDE)


def show_value(value: Any, output: Output, names: Iterable[str]) -> None:
    """Print a value to stdout for programs: as JSON, as YAML, or its `names`, one a line."""
    if output is not Output.NAME:
        show_data(value, output)
        return
    for name in names:
        show_text(name)


def visible(columns: Sequence[Column[Item]], output: Output) -> list[Column[Item]]:
    """The columns that `output` shows."""
    return [column for column in columns if output is Output.WIDE or not column.wide]


def show_data(value: Any, output: Output) -> None:
    """Print a value to stdout as JSON, or as YAML if `output` is that."""
    value = plain(value)
    if output is Output.YAML:
        import yaml

        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        if escaped(text, OWN_LINES) != text:
            text = yaml.safe_dump(value, sort_keys=False)  # with escapes for all that is not ASCII
        show_text(text, nl=False)
    else:
        show_text(json_text(value, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for people and programs: all that is not ASCII is escaped if something in it steers a
    terminal."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if escaped(text, OWN_LINES) == text else json.dumps(value, indent=indent)


def print_table(rows: Table, wide: bool = False) -> None:
    """Print to stdout. On a terminal, cells are wrapped if the table is too wide, unless it is
    `wide`. A pipe, and a terminal too narrow for any cell, get one line for each row."""
    console = stdout_console()
    if console.is_terminal and console.width >= _FOLDS_FROM and not wide:
        console.print(rows)
        return
    console.width = max(
        console.width,
        console.measure(rows, options=console.options.update(width=_ANY_WIDTH)).maximum,
    )
    console.print(rows)


def table(items: Iterable[Item], columns: Sequence[Column[Item]]) -> Table:
    """A table without frames, so that it reads well and can be cut with awk."""
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        result.add_column(
            column.title, justify="right" if column.right else "left", overflow="fold"
        )
    for item in items:
        result.add_row(*(Text(escaped(column.cell(item))) for column in columns))
    return result


def show_below(
    items: Sequence[Item], columns: Sequence[Column[Item]], output: Output = Output.TABLE
) -> None:
    """Print a table to stdout, below the earlier output; prints nothing without items."""
    if items:
        show_text()
        print_table(table(items, visible(columns, output)))


def show_fields(fields: Mapping[str, str]) -> None:
    """Print `name: value` lines to stdout, the values aligned."""
    width = max(len(name) for name in fields) + 2
    for name, value in fields.items():
        show_text(f"{name + ':':<{width}}{escaped(value)}")


def plain(value: Any) -> Any:
    """A domain value as JSON types: dataclasses become objects, layer ranges `0:4`, errors their
    parts."""
    return _PLAIN.write(Any, value)


class _Plain(Forms):
    """For programs, which read and never write: each value by its own class, whatever type is
    declared for it."""

    def hints(self, kind: type, where: str) -> Mapping[str, Any]:
        return dict.fromkeys(field_names(kind), Any)

    def write_any(self, value: Any) -> Any:
        if isinstance(value, LayerRange):
            return str(value)
        if isinstance(value, Mapping):
            return {str(key): self.write_any(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.write_any(item) for item in value]
        has_form = is_object(type(value)) or isinstance(value, Enum | EdgeShardError)
        return self.write(type(value), value) if has_form else value

    def write_error(self, error: EdgeShardError) -> dict[str, Any]:
        return {"reason": error.reason, "field": error.field, "message": error.message}


_PLAIN = _Plain("output", "")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raises InvalidArgumentError naming the option for a path that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write {option} {path}: {error.strerror}", field=option[2:]
        ) from None


def human_bytes(count: int) -> str:
    """Bytes with a binary unit, three significant digits: `512 B`, `18.4 MiB`."""
    return _scaled(count, 1024, "B", "KiB", "MiB", "GiB", "TiB")


def human_count(count: int) -> str:
    """A number with a decimal suffix, three significant digits: `950`, `6.52M`, `8.03B`."""
    return _scaled(count, 1000, "", "K", "M", "B").replace(" ", "")


def human_seconds(seconds: float) -> str:
    """`12.3 ms` below a second, `1.23 s` above."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def gap_text(gap: float) -> str:
    """How far a plan may be from the best."""
    return "0 (exact)" if gap < 1e-9 else f"at most {100 * gap:.2f} %"


def human_rate(bits_per_second: float) -> str:
    """Bits a second with a decimal unit, three significant digits: `936 Mb/s`, `9.41 Gb/s`."""
    return _scaled(bits_per_second, 1000, "b/s", "Kb/s", "Mb/s", "Gb/s")


def time_text(time: str) -> str:
    """An ISO 8601 time of UTC for people, to the second: `2026-11-29T14:05:09Z`, one word for
    awk."""
    return f"{time[:19]}Z"


def time_of(utc_s: float) -> str:
    """Seconds since 1970 in the same form, to the minute: `2026-11-29T14:05Z`."""
    return f"{datetime.fromtimestamp(utc_s, UTC):%Y-%m-%dT%H:%MZ}"


def human_age(seconds: float) -> str:
    """How long ago, roughly: `12 s ago`, `3 min ago`, `5 h ago`, `2 d ago`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds / size)} {unit} ago"
    return f"{int(seconds)} s ago"


def _scaled(size: float, step: int, *units: str) -> str:
    """A size in the first unit that gives fewer than `step`, with three significant digits; or in
    the last unit."""
    at = 0
    while size >= step and at < len(units) - 1:
        size, at = size / step, at + 1
    digits = 0 if size >= 100 or size == int(size) else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {units[at]}".rstrip()


def stdout_console() -> Console:
    return _console(sys.stdout)


def stderr_console() -> Console:
    return _console(sys.stderr)


@cache
def plain_console() -> type[Console]:
    """A console whose texts cannot steer the terminal. The class is made at its first use because
    rich takes long to import."""
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        """Rich's styles and live lines, and every text in them with escapes for control
        characters."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(escaped(segment.text, OWN_LINES), segment.style)

    return PlainConsole


def _console(stream: Any) -> Console:
    console = plain_console()(file=stream, highlight=False, soft_wrap=False)
    if not stream.isatty():
        # A pipe has no width: never wrap or cut the input of a program.
        console.width = _ANY_WIDTH
    return console


def printable(text: str) -> str:
    """A model's text for a terminal: control characters other than newline and tab are dropped."""
    return "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160))
