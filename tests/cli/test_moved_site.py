"""Settings after the folder with the files that they name was moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.cli.commands.site import certificate, join
from edgeshard.client import site_access as client_settings
from edgeshard.domain.identity import Invitation, Principal, Role
from edgeshard.local.own_site import _is_of_moved_site
from edgeshard.local.user_files import write_client_settings
from edgeshard.process.config import load_settings
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import tls_files


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def operator_files(folder: Path, authority: bytes) -> Path:
    """The folder with an operator's files of a site, and the site's authority."""
    files = folder / "pki" / "operator-admin"
    files.mkdir(parents=True)
    (files / "ca.pem").write_bytes(authority)
    (folder / "ca.pem").write_bytes(authority)
    return files


def test_settings_follow_a_folder_that_was_moved_or_copied(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert not _is_of_moved_site(tmp_path / "ca.pem"), "there are no settings"
    write_client_settings("127.0.0.1:1", operator_files(first, b"ours"))
    operator_files(second, b"ours")
    assert _is_of_moved_site(second / "ca.pem"), "a copy: both folders are of one site"
    (second / "ca.pem").write_bytes(b"theirs")
    assert not _is_of_moved_site(second / "ca.pem"), "another site, whose settings stay"
    first.rename(tmp_path / "third")
    assert _is_of_moved_site(second / "ca.pem"), "moved: the files that are named are gone"


def test_settings_of_a_join_stay_though_their_files_are_away(tmp_path: Path) -> None:
    write_client_settings("127.0.0.1:1", tmp_path / "unplugged" / "joined")
    (tmp_path / "ca.pem").write_bytes(b"ours")
    assert not _is_of_moved_site(tmp_path / "ca.pem")


def files_in(folder: Path) -> TlsFiles:
    """Empty PEM files."""
    files = tls_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (files.ca, files.cert, files.key):
        path.touch()
    return files


def test_a_node_that_joined_runs_where_its_folder_was_moved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def served(*_: object) -> int:
        return 0

    monkeypatch.setattr(join, "_enrol_once", lambda _, directory: files_in(directory))
    monkeypatch.setattr(join, "_serve", served)
    invitation = Invitation(
        b"d" * 32, Principal("mill", Role.AGENT, "pi"), "127.0.0.1:1", "127.0.0.1:2", b"s" * 16
    )
    with pytest.raises(typer.Exit):
        join._join_here(invitation, "127.0.0.1:0", tmp_path / "first", {})
    (tmp_path / "first").rename(tmp_path / "second")
    moved = load_settings(
        AgentSettings, "edgeshard-agent", ["--config", str(tmp_path / "second/agent.toml")]
    )
    assert moved.state_dir == tmp_path / "second"
    paths = (moved.tls_ca, moved.tls_cert, moved.tls_key)
    assert TlsFiles(*paths) == tls_files(tmp_path / "second/pki")  # type: ignore[arg-type]


def test_a_site_of_init_runs_where_its_folder_was_moved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    certificate.init("mill", Path("first"))
    (tmp_path / "first").rename(tmp_path / "second")
    config = str(tmp_path / "second/coordinator.toml")
    moved = load_settings(CoordinatorSettings, "edgeshard-coordinator", ["--config", config])
    files = moved.tls()
    assert files is not None
    files.check()
    assert moved.ca_key == tmp_path / "second/ca.key" and moved.ca_key.exists()
    assert moved.state_dir == tmp_path / "state/edgeshard/coordinator", "it was never in the folder"


def test_credentials_of_a_user_are_found_where_they_were_moved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_in(client_settings.directory())
    write_client_settings("127.0.0.1:1", client_settings.directory())
    (tmp_path / "config").rename(tmp_path / "another")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    found = client_settings.access(plaintext=False)
    assert found.tls == tls_files(tmp_path / "another/edgeshard")
