"""The directory that a node keeps its id in."""

from __future__ import annotations

import stat
from pathlib import Path

from edgeshard_agent.daemon import persistent_node_id


def test_it_is_its_owners_alone_and_keeps_the_id(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    directory.chmod(0o755)  # as an older version, or an operator, made it
    node_id = persistent_node_id(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert persistent_node_id(directory) == node_id
