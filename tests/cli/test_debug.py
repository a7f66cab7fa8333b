"""edgectl debug: the file, its readers, and the message if there is none."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeName

AWAY = UnavailableError("the node is not connected", reason="NODE_AWAY")


@pytest.fixture
def known(site: Any) -> Any:
    site.dumps = [
        ProcessDump(NodeName(""), b'{"state": 1}'),
        ProcessDump(NodeName("a"), b'{"state": 2}'),
        ProcessDump(NodeName("b"), failure=AWAY),
    ]
    return site


def test_one_file_holds_all_and_is_its_owners_alone(
    edgectl: Any, known: Any, tmp_path: Path
) -> None:
    path = tmp_path / "site.json"
    result = edgectl("debug", "dump", "-o", str(path))
    assert result.exit_code == 0, result.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    document = json.loads(path.read_text())
    assert (
        document["dump"] == 1 and document["coordinator"] == {"state": 1} and document["taken_at"]
    )
    away = {"failure": {"reason": "NODE_AWAY", "message": "the node is not connected"}}
    assert document["nodes"] == {"a": {"state": 2}, "b": away}
    assert result.stdout.startswith(f"{path}: ") and result.stdout.endswith(
        "of the coordinator and 1 node\n"
    )
    assert result.stderr == "node b is missing: the node is not connected\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_only_when_asked(edgectl: Any, known: Any, tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    path.write_text("mine")
    path.chmod(0o644)
    result = edgectl("debug", "dump", "-o", str(path))
    assert result.exit_code == 1 and "--force" in result.stderr and path.read_text() == "mine"
    assert not known.requests, "refused before anybody is asked"
    assert edgectl("debug", "dump", "-o", str(path), "--force").exit_code == 0
    assert json.loads(path.read_text())["dump"] == 1 and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_came_meanwhile_stays(
    edgectl: Any, known: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "site.json"
    path.write_text("mine")
    monkeypatch.setattr(
        "edgeshard.cli.commands.observing.debug._check_output", lambda path, force: None
    )
    result = edgectl("debug", "dump", "-o", str(path))
    assert (
        result.exit_code == 2 and path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    )


def test_the_default_name_tells_the_time(
    edgectl: Any, known: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert edgectl("debug", "dump").exit_code == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("edgeshard-20") and path.suffix == ".json"


def test_the_dump_alone_goes_to_stdout(edgectl: Any, known: Any) -> None:
    result = edgectl("debug", "dump", "-o", "-")
    assert (
        json.loads(result.stdout)["coordinator"] == {"state": 1}
        and "node b is missing" in result.stderr
    )


def test_a_directory_that_is_not_is_said_before_anybody_is_asked(
    edgectl: Any, known: Any, tmp_path: Path
) -> None:
    result = edgectl("debug", "dump", "-o", str(tmp_path / "none" / "site.json"))
    assert result.exit_code == 2 and "--output" in result.stderr and not known.requests


def test_a_coordinator_that_does_not_answer_is_unreachable(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    site.failures["Dump"] = UnavailableError("shutting down")
    path = tmp_path / "site.json"
    assert edgectl("debug", "dump", "-o", str(path)).exit_code == 5 and not path.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"dump": 2, "coordinator": {}, "nodes": {}}', '{"dump": 1}', "1"]
)
def test_what_is_no_dump_cannot_be_replayed(edgectl: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "site.json"
    path.write_text(text)
    result = edgectl("debug", "replay", str(path))
    assert result.exit_code == 2 and result.stderr.startswith("error: "), result.stderr


def test_a_file_that_is_not_is_said(edgectl: Any, tmp_path: Path) -> None:
    result = edgectl("debug", "replay", str(tmp_path / "none.json"))
    assert result.exit_code == 2 and "cannot read" in result.stderr


def test_a_dump_of_another_version_differs_with_the_reason(edgectl: Any, tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    path.write_text(
        json.dumps(
            {"dump": 1, "coordinator": {"state": {}, "ring": {}}, "nodes": {"a": {"state": 1}}}
        )
    )
    result = edgectl("debug", "replay", str(path))
    assert result.exit_code == 1 and result.stdout.count("the file is not a dump") == 2
    assert "does not lead to the state" in result.stderr
