"""Refuse private words where the field has one of its own, and folders that hold too much; `make check` runs it.

A word is looked for in the names of files, modules, classes, functions, arguments and variables of library and daemons,
as a part between underscores or capitals. A folder of them has at most 21 modules; generated code and the records of
model families are exempt.

    python tools/lint_names.py      exits 1 on a finding
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator")
MOST_MODULES = 21
EXEMPT = ("edgeshard/proto/v1", "edgeshard/architectures/families")
SAY_INSTEAD = {
    "afresh": "replan",
    "replanning": "replan",
    "ghost": "unconnected node",
    "ghosts": "unconnected nodes",
    "strangers": "unknown stages, or what they are",
    "doors": "authenticator",
    "entrance": "middleware",
    "callers": "auth",
    "fruitless": "failed heads",
    "draws": "sampling reference",
    "box": "node",
    "boxes": "nodes",
}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def parts(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def findings(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (root / package).rglob("*.py")}):
            place = folder.relative_to(root).as_posix()
            if place in EXEMPT:
                continue
            modules = sorted(folder.glob("*.py"))
            if len(modules) > MOST_MODULES:
                yield f"{place}: {len(modules)} modules, at most {MOST_MODULES}: give it rooms"
            for path in modules:
                yield from _in_module(path, path.relative_to(root).as_posix())


def _in_module(path: Path, place: str) -> Iterator[str]:
    found = [(1, path.stem), *names(ast.parse(path.read_text(encoding="utf-8")))]
    for line, name in found:
        for part in parts(name):
            if part in SAY_INSTEAD:
                yield f"{place}:{line}: {name}: say {SAY_INSTEAD[part]!r} instead of {part!r}"


def main() -> int:
    found = list(findings(ROOT))
    for finding in found:
        print(finding, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
