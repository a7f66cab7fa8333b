"""The import rules of `.importlinter` hold on a skeleton of the tree, and each of them fails when
it is broken.

The skeleton has every module of the project, empty. The imports that the rules name are added to
it. For two neighbours of a layers contract that is one from the lower to the upper, for a forbidden
contract one of each module from each source.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise, permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = {
    "edgeshard": ROOT,
    "edgeshard_agent": ROOT / "agent",
    "edgeshard_coordinator": ROOT / "coordinator",
}
STRANGERS = {
    "edgeshard.proto": "edgeshard.domain.ids",
    "edgeshard_agent.ops": "edgeshard_agent.engine.compute_thread",
}
"""For each protected package a module that is not among its importers."""


def contracts() -> dict[str, configparser.SectionProxy]:
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    return {
        name: section
        for name, section in config.items()
        if name.startswith("importlinter:contract:")
    }


def entries(section: configparser.SectionProxy, key: str) -> list[str]:
    return section.get(key, "").split()


def layers(section: configparser.SectionProxy) -> list[list[str]]:
    """Each layer's packages, the highest first, with their containers' names."""
    lines = [
        re.split(r"\s*[|:]\s*", line.strip()) for line in section["layers"].strip().splitlines()
    ]
    (container,) = entries(section, "containers") or [""]
    return [[f"{container}.{name}".lstrip(".") for name in line] for line in lines]


def is_independent(line: str) -> bool:
    """Whether the packages of a rank may not import each other."""
    return ":" not in line


def upward(section: configparser.SectionProxy) -> list[tuple[str, str]]:
    """(importer, imported): from each layer to the one above, and between those with `|` between
    them."""
    found = [
        (low, high) for above, below in pairwise(layers(section)) for low in below for high in above
    ]
    lines = section["layers"].strip().splitlines()
    ranks = [
        rank for rank, line in zip(layers(section), lines, strict=True) if is_independent(line)
    ]
    return found + [pair for together in ranks for pair in permutations(together, 2)]


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    for package, root in TREES.items():
        for path in (root / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    (tmp_path / ".importlinter").write_text((ROOT / ".importlinter").read_text())
    return tmp_path


def plant(skeleton: Path, imports: list[tuple[str, str]]) -> None:
    """Write the imports into the skeleton, a package's into its `__init__`."""
    lines = defaultdict(list)
    for importer, imported in imports:
        path = skeleton / importer.replace(".", "/")
        lines[path / "__init__.py" if path.is_dir() else path.with_suffix(".py")].append(
            f"import {imported}\n"
        )
    for path, text in lines.items():
        path.write_text("".join(text))


def linted(skeleton: Path) -> str:
    """The output of lint-imports for the skeleton, on lines without breaks."""
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=skeleton,
        env={**os.environ, "PYTHONPATH": str(skeleton), "COLUMNS": "1000", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in (0, 1) and "Contracts:" in result.stdout, (
        result.stdout + result.stderr
    )
    return result.stdout


def test_the_skeleton_keeps_every_rule(skeleton: Path) -> None:
    said = linted(skeleton)
    assert f"Contracts: {len(contracts())} kept, 0 broken." in said


def test_an_import_from_a_lower_layer_to_a_higher_one_is_found(skeleton: Path) -> None:
    pairs = [
        pair
        for section in contracts().values()
        if section["type"] == "layers"
        for pair in upward(section)
    ]
    assert len(pairs) > 40
    plant(skeleton, pairs)
    said = linted(skeleton)
    missed = [pair for pair in pairs if "{} is not allowed to import {}:".format(*pair) not in said]
    assert not missed


def test_a_circle_is_found_in_each_package(skeleton: Path) -> None:
    sections = contracts().values()
    (circles,) = [section for section in sections if section["type"] == "acyclic_siblings"]
    pairs = {
        "edgeshard": ("rpc", "process"),
        "edgeshard.domain": ("errors", "ids"),
        "edgeshard.planning": ("costs", "inputs"),
        "edgeshard_coordinator.core": ("machine", "nodes"),
    }
    imports = [
        (f"{package}.{one}", f"{package}.{other}")
        for package, (first, second) in pairs.items()
        for one, other in ((first, second), (second, first))
    ]
    plant(skeleton, imports)
    said = linted(skeleton)
    assert re.search(re.escape(circles["name"]) + r"\s+BROKEN", said)
    missed = [package for package in pairs if f"No cycles are allowed in {package}." not in said]
    assert not missed


def test_every_forbidden_module_is_found_in_every_place(skeleton: Path) -> None:
    forbidden = [section for section in contracts().values() if section["type"] == "forbidden"]
    pairs = [
        (source, module)
        for section in forbidden
        for source in entries(section, "source_modules")
        for module in entries(section, "forbidden_modules")
    ]
    assert len(pairs) > 200
    plant(skeleton, pairs)
    said = linted(skeleton)
    missed = [pair for pair in pairs if "{} is not allowed to import {}:".format(*pair) not in said]
    assert not missed


def test_protected_packages_are_and_a_room_without_a_layer_is_found(skeleton: Path) -> None:
    protected = [section for section in contracts().values() if section["type"] == "protected"]
    for section in protected:
        for package in entries(section, "protected_modules"):
            plant(skeleton, [(STRANGERS[package], package)])
    exhaustive = [
        section for section in contracts().values() if section.getboolean("exhaustive", False)
    ]
    for section in exhaustive:
        (container,) = entries(section, "containers")
        (skeleton / container.replace(".", "/") / "attic.py").touch()
    said = linted(skeleton)
    for section in protected + exhaustive:
        assert re.search(re.escape(section["name"]) + r"\s+BROKEN", said), section["name"]
    assert said.count("attic") >= len(exhaustive) == 4
