"""Refuse code that a reader takes in pieces; `make check` runs it.

- An assignment of three or more values at once: `a, b, c = x, y, z`. One assignment a line.
- An assignment of two values over several lines.
- A comprehension inside another one, if the inner one does not fit one line. Name it, or use a
  loop.

The length of lines is ruff's (E501, pyproject.toml).

    python tools/lint_shape.py      exits 1 on a finding
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("edgeshard", "agent", "coordinator", "bench", "deploy", "docs", "tests", "tools")
MAX_VALUES = 2
"""Values of an assignment on one line."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each finding in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and _values(node) > _max_values(node):
            yield node.lineno, f"{_values(node)} values in one assignment: one assignment a line"
        elif isinstance(node, _COMPREHENSIONS):
            for inner in ast.walk(node):
                if (
                    inner is not node
                    and isinstance(inner, _COMPREHENSIONS)
                    and inner.end_lineno != inner.lineno
                ):
                    yield (
                        inner.lineno,
                        "an inner comprehension on several lines: name it, or use a loop",
                    )


def _max_values(node: ast.Assign) -> int:
    return MAX_VALUES if node.end_lineno == node.lineno else 1


def _values(node: ast.Assign) -> int:
    """The values that an assignment gives to as many targets; 0 if it unpacks one value."""
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return len(target.elts)
    return 0


def main() -> int:
    count = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            for line, text in findings(path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(ROOT)}:{line}: {text}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
