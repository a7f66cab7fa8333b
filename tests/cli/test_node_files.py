"""The site that edgectl upgrade takes wheels from: of a service, of a user's node, of the user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.local.user_files import member_of_machine, state_home, write_client_settings
from edgeshard.rpc.tls_files import tls_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("EDGESHARD__CLIENT__")]:
        monkeypatch.delenv(name)


def write_node(directory: Path, coordinator: str, age_s: float) -> None:
    directory.mkdir(parents=True)
    path = directory / "agent.toml"
    path.write_text(f'[agent]\ncoordinator = "{coordinator}"\n')
    os.utime(path, (1e9 - age_s, 1e9 - age_s))


def test_a_service_comes_before_nodes_of_the_user_and_these_before_the_user(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="--from FILE"):
        member_of_machine(tmp_path)
    write_client_settings("10.0.0.1:7600", tmp_path / "config")
    assert member_of_machine(tmp_path).coordinator == "10.0.0.1:7600"
    write_node(state_home() / "new", "10.0.0.3:7600", 0)
    write_node(state_home() / "old", "10.0.0.2:7600", 100)
    found = member_of_machine(tmp_path)
    assert found.coordinator == "10.0.0.3:7600"
    assert found.files == tls_files(state_home() / "new" / "pki")
    write_node(tmp_path / "etc" / "edgeshard", "10.0.0.4:7600", 200)
    found = member_of_machine(tmp_path)
    assert found.coordinator == "10.0.0.4:7600"
    assert found.files == tls_files(tmp_path / "etc" / "edgeshard" / "agent-pki")


def test_a_configuration_without_a_coordinator_is_named(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "edgeshard" / "agent.toml"
    path.parent.mkdir(parents=True)
    path.write_text("agent = 3\n")
    with pytest.raises(InvalidArgumentError, match="names no coordinator"):
        member_of_machine(tmp_path)
