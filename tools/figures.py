"""List the figures of the documents that were measured on code that has changed since: `make
figures`.

A comment next to figures names the command that measured them, and git's trees of the folders that
they depend on:

    <!-- figures: python -m bench.hop @ agent:0123456789 edgeshard/rpc:89abcdef01 -->

If the command ends with "(of COMMIT)", its program is no longer kept, and that commit has it.

    python -m tools.figures                     all of them, and what has changed since
    python -m tools.figures --stamp FILE[:N]    after measuring again: today's trees into FILE's comments, or line N's
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMIT = re.compile(r" \(of ([0-9a-f]{8})\)$")
"""Behind the command of a program that is no longer kept."""
DIGITS = 10
"""Digits of a tree's hash."""
UNKNOWN = "unknown"
_MARKER = re.compile(r"^ *<!-- figures: (?P<command>.+?) @ (?P<rooms>\S+:\S+(?: \S+:\S+)*) -->$")


@dataclass(frozen=True)
class Figures:
    """A comment next to figures: its line, the command that measured them, and the tree of each folder by its path."""

    line: int
    command: str
    trees: Mapping[str, str]

    @property
    def commit(self) -> str | None:
        """The last commit that has the program, if it is no longer kept."""
        found = COMMIT.search(self.command)
        return found[1] if found else None

    def changed(self, now: Mapping[str, str]) -> list[str]:
        return [room for room, tree in self.trees.items() if now[room] != tree]


def figures_of(text: str) -> list[Figures]:
    """A page's, in order."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if marker := _MARKER.match(line):
            pairs = (word.rpartition(":") for word in marker["rooms"].split())
            found.append(Figures(number, marker["command"], {room: tree for room, _, tree in pairs}))
    return found


def marker(command: str, trees: Mapping[str, str]) -> str:
    return f"<!-- figures: {command} @ {' '.join(f'{room}:{tree}' for room, tree in trees.items())} -->"


def trees_now(rooms: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The tree of each room as its files are now, committed or not; UNKNOWN for one that is not there, and without
    git."""
    wanted = list(dict.fromkeys(rooms))
    with tempfile.TemporaryDirectory(prefix="edgeshard-figures-") as scratch:
        index = Path(scratch) / "index"  # a copy, so that the checkout's own index does not change
        environment = {**os.environ, "GIT_INDEX_FILE": str(index)}

        def git(*words: str, env: Mapping[str, str] = environment) -> str:
            return subprocess.run(["git", *words], cwd=root, env=env, capture_output=True, text=True, check=True).stdout

        try:
            own = root / git("rev-parse", "--git-path", "index", env=os.environ).strip()
            if own.exists():
                shutil.copy2(own, index)
            git("add", "--all", "--", *(room for room in wanted if (root / room).exists()))
            whole = git("write-tree").strip()
            return {room: _tree(git, whole, room) for room in wanted}
        except (OSError, subprocess.CalledProcessError):
            return dict.fromkeys(wanted, UNKNOWN)


def _tree(git: object, whole: str, room: str) -> str:
    assert callable(git)
    try:
        return str(git("rev-parse", f"{whole}:{room}")).strip()[:DIGITS]
    except subprocess.CalledProcessError:
        return UNKNOWN


def stamped(text: str, now: Mapping[str, str], line: int | None) -> str:
    """The page with today's trees in its comments, or in that of one line. Raises ValueError if there is none."""
    chosen = {found.line: found for found in figures_of(text) if line in (None, found.line)}
    if not chosen:
        raise ValueError(f"there are no figures on line {line}" if line else "there are no figures")
    lines = text.splitlines(keepends=True)
    for number, found in chosen.items():
        lines[number - 1] = marker(found.command, {room: now[room] for room in found.trees}) + "\n"
    return "".join(lines)


def pages(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamp", metavar="FILE[:N]")
    options = parser.parse_args()
    found = {page: figures_of(page.read_text(encoding="utf-8")) for page in pages()}
    now = trees_now(room for figures in found.values() for one in figures for room in one.trees)
    if options.stamp is not None:
        name, _, line = options.stamp.partition(":")
        page = Path(name).resolve()
        try:
            text = stamped(page.read_text(encoding="utf-8"), now, int(line) if line else None)
        except ValueError as error:
            parser.error(f"{options.stamp}: {error}")
        page.write_text(text, encoding="utf-8")
        return 0
    stale = 0
    for page, figures in found.items():
        for one in figures:
            changed = one.changed(now)
            stale += bool(changed) and one.commit is None
            told = f"stale, for these have changed since: {', '.join(changed)}" if changed else "current"
            told = told if one.commit is None else "measured once"
            print(f"{page.relative_to(ROOT)}:{one.line}: {one.command}: {told}")
    print(f"{stale} of {sum(map(len, found.values()))} are stale", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
