"""Reads the fenced blocks of the project's documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests" / "README.md"])
LONGEST_LINE = 120
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_REASON = re.compile(r"^ *<!-- not run: (?P<reason>.+) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its line, its language, its text, and the reason of a comment above it for
    not running it."""

    path: Path
    line: int
    language: str
    text: str
    reason: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """The document's fenced blocks in order."""
    lines = path.read_text().splitlines()
    found: list[Block] = []
    start: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if not fence:
            continue
        if start is None:
            start = number
            continue
        opening = _FENCE.match(lines[start])
        assert opening is not None
        above = next((text for text in reversed(lines[:start]) if text.strip()), "")
        reason = _REASON.match(above)
        text = (
            "\n".join(row.removeprefix(opening["indent"]) for row in lines[start + 1 : number])
            + "\n"
        )
        found.append(
            Block(
                path, start + 1, opening["info"].strip(), text, reason["reason"] if reason else ""
            )
        )
        start = None
    assert start is None, f"{path}: the block opened on line {(start or 0) + 1} is never closed"
    return found


def long_lines(text: str, most: int = LONGEST_LINE) -> list[int]:
    """The numbers of prose lines that are too long and could be broken. Code, tables, comments and
    lines of one word such as a URL do not count."""
    hidden = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    hidden = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), hidden)
    found = []
    for number, line in enumerate(hidden.splitlines(), 1):
        words = re.sub(r"^ *([-*+]|\d+\.) +", "", line).split()
        if len(line) > most and len(words) > 1 and not line.lstrip().startswith(("|", "#")):
            found.append(number)
    return found


def anchors(path: Path) -> set[str]:
    """The allowed fragments of a link after #: the document's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
