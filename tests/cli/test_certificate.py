"""The authority of a site and the files of its processes, as an operator makes them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.daemon import _http_listen, _site
from edgeshard_coordinator.settings import CoordinatorSettings
from typer.testing import CliRunner

from edgeshard.cli.main import app
from edgeshard.client.site_access import access, configuration
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Principal, Role, coordinator_of
from edgeshard.process.config import load_settings
from edgeshard.rpc.tls_files import tls_files


@pytest.fixture
def edgectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "-d", str(tmp_path / "pki")])

    return invoke


def test_a_site_is_made_with_an_operator_and_a_coordinator(edgectl: Any, tmp_path: Path) -> None:
    assert edgectl("init", "mill").exit_code == 0
    assert edgectl("certificate", "agent", "node-a").exit_code == 0
    made = {
        "coordinator": coordinator_of("mill"),
        "admin": Principal("mill", Role.OPERATOR, "admin"),
    }
    made["node-a"] = Principal("mill", Role.AGENT, "node-a")
    for name, principal in made.items():
        files = tls_files(tmp_path / "pki" / name)
        files.check()
        assert files.principal() == principal
    for path in (tmp_path / "pki").rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, f"{path} is open to others"


@pytest.mark.parametrize(
    ("arguments", "field", "exit_code"),
    [
        (("init", "other"), "directory", 1),
        (("init", "../mill"), "site", 2),
        (("certificate", "coordinator", "coordinator"), "role", 2),
        (("certificate", "agent", "admin"), "name", 1),
        (("certificate", "agent", "../../etc"), "name", 2),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    edgectl: Any, tmp_path: Path, arguments: tuple[str, ...], field: str, exit_code: int
) -> None:
    assert edgectl("init", "mill").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ended = edgectl(*arguments)
    assert isinstance(ended.exception, EdgeShardError) or ended.exit_code == exit_code, ended.output
    error = ended.exception
    if isinstance(error, EdgeShardError):
        assert error.field == field
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_without_an_authority_nothing_is_made(edgectl: Any, tmp_path: Path) -> None:
    ended = edgectl("certificate", "agent", "a")
    assert ended.exit_code != 0 and not list(tmp_path.iterdir())


def test_init_leaves_what_starts_a_coordinator_and_makes_this_user_the_operator(
    edgectl: Any, tmp_path: Path
) -> None:
    assert edgectl("init", "mill", "--listen", "127.0.0.1:7777").exit_code == 0
    settings = load_settings(
        CoordinatorSettings,
        "edgeshard-coordinator",
        ["--config", str(tmp_path / "pki" / "coordinator.toml")],
    )
    assert (settings.listen, settings.enrol_listen) == ("127.0.0.1:7777", "127.0.0.1:7778")
    files = settings.tls()
    assert files is not None and files.principal() == coordinator_of("mill")
    assert settings.ca_key == tmp_path / "pki" / "ca.key"
    own = access(plaintext=False)
    assert own.target == "127.0.0.1:7777" and own.tls is not None
    assert own.tls.principal() == Principal("mill", Role.OPERATOR, "admin")


def test_init_leaves_an_operator_of_another_site_alone(edgectl: Any, tmp_path: Path) -> None:
    assert edgectl("init", "mill").exit_code == 0
    before = configuration().read_bytes()
    ended = CliRunner().invoke(app, ["init", "weir", "-d", str(tmp_path / "weir")])
    assert ended.exit_code == 0 and "belongs to another site" in ended.output
    assert configuration().read_bytes() == before


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("0.0.0.0:8443", "0.0.0.0:8443 over TLS, by a certificate of"),
    ],
)
def test_init_leaves_a_coordinator_with_a_gateway(
    edgectl: Any, tmp_path: Path, address: str, said: str
) -> None:
    ended = edgectl("init", "mill", "--http-listen", address)
    assert ended.exit_code == 0 and said in ended.output
    config = str(tmp_path / "pki" / "coordinator.toml")
    settings = load_settings(CoordinatorSettings, "edgeshard-coordinator", ["--config", config])
    listen, certificate = _http_listen(settings, _site(settings))
    assert listen is not None and listen.address == address
    assert (certificate is None) == listen.is_local, (
        "it makes a certificate of its own beyond loopback"
    )


def test_an_address_of_the_gateway_that_is_none_makes_no_site(edgectl: Any, tmp_path: Path) -> None:
    assert edgectl("init", "mill", "--http-listen", "8000").exit_code != 0 and not list(
        tmp_path.iterdir()
    )
