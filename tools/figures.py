"""List the figures of the documents that were measured on code that has changed since: `make
figures`.

A comment next to figures names the program that measured them. It also has a hash of each folder
they depend on:

    <!-- figures: python -m bench.hop @ agent:0123456789 edgeshard/rpc:89abcdef01 -->

The hash covers names and code of a folder's files. It ignores docstrings and comments, so a
translated comment outdates no figure. If the command ends with "(of COMMIT)", its program exists
only up to that commit.

    python -m tools.figures
        list all figures, and the folders that have changed since
    python -m tools.figures --stamp FILE[:N]
        after a new measurement: write today's hashes into FILE, or its line N
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMIT = re.compile(r" \(of ([0-9a-f]{8})\)$")
"""Stands after the command of a program that was deleted."""
DIGITS = 10
"""Length of a folder's hash."""
UNKNOWN = "unknown"
_C_LIKE = (".cpp", ".h", ".proto", ".js")
_C_COMMENT = re.compile(r"^[ \t]*/\*[\s\S]*?\*/|(?:^|[ \t])//(?: .*)?$", re.MULTILINE)
_MARKER = re.compile(r"^ *<!-- figures: (?P<command>.+?) @ (?P<rooms>\S+:\S+(?: \S+:\S+)*) -->$")


@dataclass(frozen=True)
class Figures:
    """A comment next to figures: its line, the command that measured them, and each folder's hash
    by path."""

    line: int
    command: str
    trees: Mapping[str, str]

    @property
    def commit(self) -> str | None:
        """The last commit that has the program; None if the program still exists."""
        found = COMMIT.search(self.command)
        return found[1] if found else None

    def changed(self, now: Mapping[str, str]) -> list[str]:
        return [room for room, tree in self.trees.items() if now[room] != tree]


def figures_of(text: str) -> list[Figures]:
    """The figures of a page, in order."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if marker := _MARKER.match(line):
            pairs = (word.rpartition(":") for word in marker["rooms"].split())
            found.append(
                Figures(number, marker["command"], {room: tree for room, _, tree in pairs})
            )
    return found


def marker(command: str, trees: Mapping[str, str]) -> str:
    return (
        f"<!-- figures: {command} @ "
        f"{' '.join(f'{room}:{tree}' for room, tree in trees.items())} -->"
    )


def trees_now(rooms: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The hash of each folder's files as they are now, committed or not.

    It is UNKNOWN for a folder that does not exist, and for all folders if `root` is no git
    repository.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return dict.fromkeys(rooms, UNKNOWN)
    names = {name for name in listed.split("\0") if name and (root / name).is_file()}
    trees = {}
    for room in dict.fromkeys(rooms):
        inside = [name for name in names if name == room or name.startswith(f"{room}/")]
        files = {name.removeprefix(f"{room}/"): (root / name).read_bytes() for name in inside}
        trees[room] = tree_hash(files) if files else UNKNOWN
    return trees


def tree_hash(files: Mapping[str, bytes]) -> str:
    """The hash of a folder, from the content of its files by name."""
    whole = hashlib.sha256()
    for name in sorted(files):
        code = code_of(name, files[name])
        whole.update(f"{name}\0{len(code)}\0".encode() + code)
    return whole.hexdigest()[:DIGITS]


def code_of(name: str, content: bytes) -> bytes:
    """The content without comments, docstrings and blank lines.

    Only Python and languages with comments like C's are read so; all other files, and files that do
    not parse, are returned as they are.
    """
    try:
        if name.endswith((".py", ".pyi")):
            text = _without_python_comments(content.decode())
        elif name.endswith(_C_LIKE):
            text = _C_COMMENT.sub("", content.decode())
        else:
            return content
    except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
        return content
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line).encode()


def _without_python_comments(text: str) -> str:
    """The text without comments and without statements that consist only of string literals."""
    spans = []
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            spans.append((token.start, token.end))
        elif token.type == tokenize.NEWLINE:
            if all(part.type == tokenize.STRING for part in statement):
                spans.extend((part.start, part.end) for part in statement)
            statement = []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
    lines = text.splitlines(keepends=True)
    for (first, begin), (last, end) in sorted(spans, reverse=True):
        lines[first - 1 : last] = [lines[first - 1][:begin] + lines[last - 1][end:]]
    return "".join(lines)


def stamped(text: str, now: Mapping[str, str], line: int | None) -> str:
    """The page with today's hashes in its comments, or in that of one line. Raises ValueError if
    there is none."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            told = (
                f"stale, for these have changed since: {', '.join(changed)}"
                if changed
                else "current"
            )
            told = told if one.commit is None else "measured once"
            print(f"{page.relative_to(ROOT)}:{one.line}: {one.command}: {told}")
    print(f"{stale} of {sum(map(len, found.values()))} are stale", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
