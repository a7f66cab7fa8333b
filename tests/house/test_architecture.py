"""The pages on architecture and algorithms follow the code: rooms, drawn phases, the sections that
are cited."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.transitions import TRANSITIONS, Trigger

import edgeshard.proto.v1
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from tests.house import documents

ROOT = documents.ROOT
ROOMS = ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator")
CITING = [
    path
    for top in ("edgeshard", "agent", "coordinator", "bench", "tools")
    for path in (ROOT / top).rglob("*.py")
]
CITING += [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]


@pytest.fixture
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "draw_architecture", ROOT / "tools" / "draw_architecture.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["phases", "imports", "keys", "cards", "openai", "ollama"])
def test_what_is_drawn_is_what_the_code_says(draw: ModuleType, name: str) -> None:
    text = (ROOT / draw.DOCUMENTS[name]).read_text()
    assert draw.with_drawing(text, name, draw.drawings()[name]) == text, "run `make drawings`"


def test_layers_are_drawn_for_every_container(draw: ModuleType) -> None:
    rules = """[importlinter:contract:one]
type = layers
containers = some.package
layers =
    high
    low | beside

[importlinter:contract:two]
type = forbidden
"""
    assert draw.import_layers(rules).splitlines()[1:-1] == ["some.package: high > low | beside"]


def test_every_change_of_the_table_changes_the_drawing(draw: ModuleType) -> None:
    drawn = draw.phase_graph(TRANSITIONS)
    for row in TRANSITIONS:
        without = {key: phase for key, phase in TRANSITIONS.items() if key != row}
        assert draw.phase_graph(without) != drawn
    other = {**TRANSITIONS, (Phase.FAILED, Trigger.NODES_BACK): Phase.LOADING}
    assert draw.phase_graph(other) != drawn


def test_a_document_without_the_marks_is_refused(draw: ModuleType) -> None:
    with pytest.raises(ValueError, match="must hold the lines"):
        draw.with_drawing("# Architecture\n", "phases", "graph")


def test_every_section_that_code_cites_exists() -> None:
    pages = ("papers.md", "papers/agent.md")
    headings = {page: documents.anchors(ROOT / "docs" / page) for page in pages}
    citations = 0
    for path in CITING:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in re.finditer(r"(\S*?)(papers(?:/\w+)?\.md)(?:#([\w-]+))?", line):
                place = f"{path.relative_to(ROOT)}:{number}"
                page = match[2]
                assert match[1].endswith("docs/"), f"{place} cites a {page} that is not in docs/"
                assert page in headings, f"{place} cites docs/{page}; the pages are {pages}"
                assert match[3], (
                    f"{place} cites docs/{page} without a section, as in docs/papers.md#subset-dp"
                )
                assert match[3] in headings[page], (
                    f"{place} cites #{match[3]}; it has {sorted(headings[page])}"
                )
                citations += 1
    assert citations > 10, "the pattern finds no citations any more"


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_line_on_the_map(package: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for folder in sorted(
        path for path in (ROOT / package).iterdir() if path.is_dir() and any(path.glob("*.py"))
    ):
        room = f"{package}/{folder.name}/"
        assert re.search(rf"^\| `{re.escape(room)}` \| \S", text, re.MULTILINE), (
            f"ARCHITECTURE.md has no line on {room}"
        )


def test_each_file_on_the_map_is_in_its_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Modules")[2].partition("\n## ")[0]
    assert list(misplaced(text)) == []
    planted = "| `tests/chaos/`, `tests/fuzz/` | both | `matrix.py`, `targets.py`, `absent.py` |\n"
    assert list(misplaced(planted)) == ["absent.py"]


def misplaced(text: str) -> Iterator[str]:
    """The files of the third column that are in none of the row's folders."""
    for folders, files in re.findall(r"^\| (`[^|]+) \|[^|]*\| ([^|]*)\|$", text, re.MULTILINE):
        there = {
            path.name
            for folder in re.findall(r"`([^`]+)/`", folders)
            for path in (ROOT / folder).rglob("*")
        }
        yield from (name for name in re.findall(r"`([\w.]+\.\w+)`", files) if name not in there)


def test_a_token_has_no_more_forms_than_are_listed() -> None:
    section = (
        (ROOT / "ARCHITECTURE.md")
        .read_text()
        .partition("### Forms of a token")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert len(rows) == 5
    listed = {
        (name, *re.findall(r"`(\S+/\S+)`", row))
        for row in rows
        for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {*classes_of_tokens(), *messages_of_tokens()}


def classes_of_tokens() -> Iterator[tuple[str, str]]:
    """The classes that hold a token, its position and its log-probability, each with its file."""
    for path in (path for top in ROOMS for path in (ROOT / top).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                if is_token(field.id for field in fields if isinstance(field, ast.Name)):
                    yield node.name, str(path.relative_to(ROOT))


def messages_of_tokens() -> Iterator[tuple[str, str]]:
    for found in pkgutil.iter_modules(edgeshard.proto.v1.__path__):
        file: Any = getattr(
            importlib.import_module(f"edgeshard.proto.v1.{found.name}"), "DESCRIPTOR", None
        )
        for name, message in file.message_types_by_name.items() if file is not None else ():
            if is_token(field.name for field in message.fields):
                yield name, f"proto/{file.name}"


def is_token(fields: Iterable[str]) -> bool:
    """Columns of several tokens count, too."""
    return {"position", "token", "logprob"} <= {name.removesuffix("s") for name in fields}
