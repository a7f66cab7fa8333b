"""The pages on architecture and algorithms follow the code: rooms, drawn phases, the sections that are cited."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from edgeshard_coordinator.core.transitions import TRANSITIONS, Trigger

from edgeshard.domain.deployment import DeploymentPhase as Phase
from tests.house import documents

ROOT = documents.ROOT
ROOMS = ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator")
CITING = [
    path for top in ("edgeshard", "agent", "coordinator", "bench", "tools") for path in (ROOT / top).rglob("*.py")
]
CITING += [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]


@pytest.fixture
def draw_phases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_phases", ROOT / "tools" / "draw_phases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_phases_drawn_are_those_of_the_table(draw_phases: ModuleType) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert draw_phases.with_graph(text, draw_phases.phase_graph(TRANSITIONS)) == text, "run `make phases`"


def test_every_change_of_the_table_changes_the_drawing(draw_phases: ModuleType) -> None:
    drawn = draw_phases.phase_graph(TRANSITIONS)
    for row in TRANSITIONS:
        without = {key: phase for key, phase in TRANSITIONS.items() if key != row}
        assert draw_phases.phase_graph(without) != drawn
    other = {**TRANSITIONS, (Phase.FAILED, Trigger.NODES_BACK): Phase.LOADING}
    assert draw_phases.phase_graph(other) != drawn


def test_a_document_without_the_marks_is_refused(draw_phases: ModuleType) -> None:
    with pytest.raises(ValueError, match="must hold the lines"):
        draw_phases.with_graph("# Architecture\n", "graph")


def test_every_section_that_code_cites_exists() -> None:
    headings = documents.anchors(ROOT / "docs" / "papers.md")
    citations = 0
    for path in CITING:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in re.finditer(r"(\S*)papers\.md(?:#([\w-]+))?", line):
                place = f"{path.relative_to(ROOT)}:{number}"
                assert match[1].endswith("docs/"), f"{place} cites a papers.md that is not docs/papers.md"
                assert match[2], f"{place} cites docs/papers.md without a section, as in docs/papers.md#subset-dp"
                assert match[2] in headings, f"{place} cites #{match[2]}; the sections are {sorted(headings)}"
                citations += 1
    assert citations > 10, "the pattern finds no citations any more"


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_line_on_the_map(package: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for folder in sorted(path for path in (ROOT / package).iterdir() if path.is_dir() and any(path.glob("*.py"))):
        room = f"{package}/{folder.name}/"
        assert re.search(rf"^\| `{re.escape(room)}` \| \S", text, re.MULTILINE), (
            f"ARCHITECTURE.md has no line on {room}"
        )
