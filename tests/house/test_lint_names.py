"""Private words and full folders are found, wherever a name is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint_names import MOST_MODULES, findings, parts


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
    assert [finding.split(":")[0] for finding in findings(tmp_path)] == ["edgeshard/room", "edgeshard/room/ghosts.py"]
