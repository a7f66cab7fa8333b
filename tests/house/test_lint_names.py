"""Private words and full folders are found, wherever a name is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint_names import MOST_MODULES, Tolerated, findings, new_names, parts, tolerated


def test_a_name_is_taken_apart_at_underscores_and_capitals() -> None:
    assert parts("TellStrangers_of_HTTPDoors") == ["tell", "strangers", "of", "http", "doors"]


@pytest.mark.parametrize(
    "code",
    [
        "class KeyDoors: ...",
        "def plan_afresh(): ...",
        "def f(ghost): ...",
        "MOST_STRANGERS = 3",
        "async def doors(): ...",
    ],
)
def test_a_private_word_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "edgeshard").mkdir()
    (tmp_path / "edgeshard" / "fine.py").write_text(f"outdoors = 1\n{code}\n")
    (found,) = findings(tmp_path)
    assert found.startswith("edgeshard/fine.py:2: ") and "say" in found


def test_a_file_is_named_too_and_a_folder_has_so_many(tmp_path: Path) -> None:
    room = tmp_path / "edgeshard" / "room"
    room.mkdir(parents=True)
    for number in range(MOST_MODULES):
        (room / f"module_{number}.py").touch()
    assert not list(findings(tmp_path))
    (room / "ghosts.py").touch()
    assert [finding.split(":")[0] for finding in findings(tmp_path)] == [
        "edgeshard/room",
        "edgeshard/room/ghosts.py",
    ]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("def f(found): ...", "participles"),
        ("MOST_NODES = 3", "MAX_"),
        ("class Node: ...", "Node has 2 definitions"),
    ],
)
def test_a_new_name_that_the_baseline_lacks_is_found(tmp_path: Path, code: str, word: str) -> None:
    (tmp_path / "edgeshard").mkdir()
    (tmp_path / "edgeshard" / "fine.py").write_text("class Node: ...\ncut = left = MAX_NODES = 1\n")
    assert not list(new_names(tmp_path, Tolerated()))
    (tmp_path / "edgeshard" / "new.py").write_text(code + "\n")
    (found,) = new_names(tmp_path, Tolerated())
    assert word in found


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "edgeshard").mkdir()
    (tmp_path / "edgeshard" / "old.py").write_text("found = 1\nMOST_NODES = 2\n")
    tolerated(tmp_path)[0].write(tmp_path / "baseline.json")
    baseline = Tolerated.read(tmp_path / "baseline.json")
    assert not list(new_names(tmp_path, baseline))
    assert len(list(new_names(tmp_path, Tolerated()))) == 2
