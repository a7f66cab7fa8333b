"""Shared parts of pages written by a benchmark: tables, numbers, and writing files or finding that
they would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.figures import UNKNOWN, marker, trees_now

NONE = "–"
SITE = ("agent", "coordinator", "edgeshard")
"""The rooms whose code a whole site runs."""


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def table_file(tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]]) -> str:
    """Tables by their titles as JSON, a row on each line: raw rows that no page needs."""
    parts = []
    for title, (header, rows) in tables.items():
        lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in [header, *rows])
        parts.append(f" {json.dumps(title)}: [\n  {lines}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def wrapped(text: str, width: int = 120) -> str:
    """A page whose paragraphs have no longer line; code, tables, comments and lists stay as they
    are."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        paragraphs = parts[index].split("\n\n")
        parts[index] = "\n\n".join(_filled(paragraph, width) for paragraph in paragraphs)
    return "".join(parts)


def _filled(paragraph: str, width: int) -> str:
    body = paragraph.strip("\n")
    if body.startswith(("|", "<!--", "#", "-", "![")) or all(
        len(line) <= width for line in body.split("\n")
    ):
        return paragraph
    filled = textwrap.fill(
        " ".join(body.split()), width, break_long_words=False, break_on_hyphens=False
    )
    return paragraph.replace(body, filled)


def with_trees(
    rows: Iterable[Mapping[str, Any]], rooms: Sequence[str] = SITE
) -> list[dict[str, Any]]:
    """The rows of a run, with the trees of git that these rooms have now."""
    trees = trees_now(rooms)
    return [{**row, "trees": trees} for row in rows]


def figures_comment(command: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The comment before a table (`tools/figures.py`): the command, and the trees its rows were
    measured on."""
    return marker(command, rows[0].get("trees") or dict.fromkeys(SITE, UNKNOWN))


def page_parser(
    module: str, output: Path
) -> tuple[argparse.ArgumentParser, argparse._MutuallyExclusiveGroup]:
    """The options of a program that writes pages, and the group of `--check`, to which others may
    belong."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--output", type=Path, default=output, metavar="DIR")
    parser.add_argument(
        "--pictures", type=Path, metavar="DIR", help="draw the figures as SVG into DIR, too"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a file would change"
    )
    return parser, either


def run_page_program(
    module: str,
    output: Path,
    files: Callable[[], Mapping[str, str]],
    pictures: Callable[[], Mapping[str, str]],
) -> int:
    """The command line of a program that computes the same files every time: 1 if --check finds
    that one differs."""
    parser, _ = page_parser(module, output)
    arguments = parser.parse_args()
    if arguments.pictures is not None:
        write_or_check(arguments.pictures, pictures(), check=False)
    return write_or_check(arguments.output, files(), arguments.check)


def write_or_check(folder: Path, files: Mapping[str, str], check: bool) -> int:
    """Write the files that differ, or with `check` only name them on stderr: then 1 when there are
    any, else 0."""
    changed = [name for name, text in files.items() if _read(folder / name) != text]
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        for name in changed:
            (folder / name).write_text(files[name], encoding="utf-8")
    for name in changed:
        print(f"{'differs' if check else 'wrote'}: {folder / name}", file=sys.stderr)
    return 1 if check and changed else 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
