"""Baselines that may only fall: findings by file that a lint accepts until somebody mends them.

The number of a file limits its findings. The numbers of files that are gone are free for new files,
so a file that moves takes its number along. The total never rises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Counts = Mapping[str, int]
"""Findings by file."""


def read(path: Path) -> dict[str, int]:
    """The numbers of a baseline's file; empty if there is no file."""
    if not path.exists():
        return {}
    numbers: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return numbers


def excess(counts: Counts, baseline: Counts, present: frozenset[str]) -> dict[str, int]:
    """Files with more findings than they may have, and how many more.

    `present` are the files of the tree: the numbers of other files are free.
    """
    free = sum(number for file, number in baseline.items() if file not in present)
    found: dict[str, int] = {}
    for file, count in sorted(counts.items()):
        more = count - baseline.get(file, 0)
        if more <= 0:
            continue
        if file not in baseline and more <= free:
            free -= more
            continue
        found[file] = more
    return found


def write(path: Path, counts: Counts) -> None:
    """Write the numbers of today as the baseline."""
    numbers = {file: count for file, count in sorted(counts.items()) if count}
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
