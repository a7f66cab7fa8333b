"""Refuse private words if the field has its own, and folders that hold too much; `make check` runs
it.

A word is looked for in the names of files, modules, classes, functions, arguments and variables of
library and daemons, as a part between underscores or capitals. A folder of them has at most 21
modules; generated code and the records of model families are exempt.

A name is a noun, not a bare participle such as `found`. A limit begins with MAX_ or MIN_. A public
class name has one definition. The names of today that break these three rules have a baseline
(tools/lint_names.json), which may only fall.

    python tools/lint_names.py
        exits 1 on a finding
    python tools/lint_names.py --lower
        write the baseline of today, if nothing has more than before
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import falling  # noqa: E402

BASELINE = ROOT / "tools" / "lint_names.json"
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
_PARTICIPLES = """
found known kept asked wanted held chosen given told taken said made owed heard lost sent met seen
shown gone come let led spent meant
"""
PARTICIPLES = frozenset(_PARTICIPLES.split())
"""No names by themselves. `cut` is the planner's noun and `left` a side."""
LIMIT = re.compile(
    r"_?(?:MOST|LEAST|LARGEST|SMALLEST|LONGEST|SHORTEST|FEWEST|MAXIMUM|MINIMUM)_[A-Z_]+"
)


@dataclass(slots=True)
class Tolerated:
    """Names that break a rule, as a baseline has them: by file, and definitions of a class by its
    name."""

    participles: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> Tolerated:
        if not path.exists():
            return cls()
        return cls(
            **{
                rule: Counter(counts)
                for rule, counts in json.loads(path.read_text(encoding="utf-8")).items()
            }
        )

    def write(self, path: Path) -> None:
        rules = {"participles": self.participles, "limits": self.limits, "classes": self.classes}
        sorted_counts = {rule: dict(sorted(counts.items())) for rule, counts in rules.items()}
        path.write_text(json.dumps(sorted_counts, indent=1) + "\n", encoding="utf-8")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each definition in a module."""
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


def tolerated(root: Path) -> tuple[Tolerated, list[str]]:
    """The names of today that break a rule with a baseline, and the files of the product."""
    today = Tolerated()
    files: list[str] = []
    definitions: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            if "_pb2" in path.name:
                continue
            files.append(place)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for _, name in names(tree):
                today.participles[place] += name.lstrip("_") in PARTICIPLES
                today.limits[place] += LIMIT.fullmatch(name) is not None
            definitions.update(_public_classes(tree))
    today.participles = +today.participles
    today.limits = +today.limits
    today.classes = Counter({name: count for name, count in definitions.items() if count > 1})
    return today, files


def _public_classes(tree: ast.AST) -> set[str]:
    classes = (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name for name in classes if not name.startswith("_")}


def new_names(root: Path, baseline: Tolerated) -> Iterator[str]:
    """A line for each file or class with more broken names than the baseline has."""
    today, files = tolerated(root)
    present = frozenset(files)
    for file, more in falling.excess(today.participles, baseline.participles, present).items():
        yield f"{file}: {more} more names that are bare participles: name what the value is"
    for file, more in falling.excess(today.limits, baseline.limits, present).items():
        yield f"{file}: {more} more limits that do not begin with MAX_ or MIN_"
    for name, count in today.classes.items():
        if count > max(1, baseline.classes[name]):
            yield f"class {name} has {count} definitions: give each meaning its own name"


def main() -> int:
    found = [*findings(ROOT), *new_names(ROOT, Tolerated.read(BASELINE))]
    if not found and sys.argv[1:] == ["--lower"]:
        tolerated(ROOT)[0].write(BASELINE)
    for finding in found:
        print(finding, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
