"""edgectl install and uninstall, below a directory; tests/system/test_services.py starts the
installed services."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.settings import CoordinatorSettings
from typer.testing import CliRunner

from edgeshard.cli.commands.site import install
from edgeshard.cli.main import app
from edgeshard.process.config import load_settings

BIN = ("--bin", "/opt/edgeshard/bin")


def edgectl(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_daemons_read_what_is_laid_out(tmp_path: Path) -> None:
    where = ("--root", str(tmp_path), *BIN)
    tls = ("--credentials", "/etc/edgeshard/tls")
    agent = ("--name", "a", "--listen", "10.0.0.5:7610", "--coordinator", "10.0.0.2:7600")
    for arguments in (("agent", *agent), ("coordinator", "--listen", "10.0.0.2:7600")):
        result = edgectl("install", *arguments, *tls, *where)
        assert result.exit_code == 0, result.output
    config = tmp_path / "etc/edgeshard"
    given = ("--state-dir", "state")
    node = load_settings(AgentSettings, "agent", ("--config", str(config / "agent.toml"), *given))
    assert (node.name, node.listen, node.coordinator) == ("a", "10.0.0.5:7610", "10.0.0.2:7600")
    site = load_settings(
        CoordinatorSettings, "coordinator", ("--config", str(config / "coordinator.toml"), *given)
    )
    assert site.listen == "10.0.0.2:7600"
    for path in tmp_path.rglob("*.service"):
        assert path.stat().st_mode & 0o777 == 0o644


def test_what_is_not_given_stays_as_at_the_last_time(tmp_path: Path) -> None:
    where = ("--root", str(tmp_path))
    edgectl(
        "install",
        "agent",
        "--plaintext",
        "--name",
        "a",
        "--coordinator",
        "127.0.0.1:7999",
        *BIN,
        *where,
    )
    result = edgectl("install", "agent", "--listen", "127.0.0.1:7610", *where)
    assert result.exit_code == 0 and "/etc/edgeshard/agent.toml" in result.stdout
    values = tomllib.loads((tmp_path / "etc/edgeshard/agent.toml").read_text())["agent"]
    assert values == {"name": "a", "coordinator": "127.0.0.1:7999", "listen": "127.0.0.1:7610"}


def test_a_configuration_that_was_edited_is_left_and_said_so(tmp_path: Path) -> None:
    where = ("--root", str(tmp_path))
    edgectl("install", "agent", "--plaintext", "--name", "a", *BIN, *where)
    config = tmp_path / "etc/edgeshard/agent.toml"
    config.write_text(config.read_text() + "threads = 2\n")
    assert f"leave   /{config.relative_to(tmp_path)}" in edgectl("install", "agent", *where).stdout
    assert (
        f"leave   /{config.relative_to(tmp_path)}" in edgectl("uninstall", "agent", *where).stdout
    )
    assert "threads = 2" in config.read_text()
    assert edgectl("uninstall", "agent", "--purge", *where).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_role_a_checkout_names_the_right_command() -> None:
    for arguments, named in (
        (("uninstall",), "rm -rf"),
        (("uninstall", "--purge"), ".local/state/edgeshard"),
        (("upgrade",), "git -C"),
        (("upgrade", "--back"), "checkout VERSION"),
    ):
        result = edgectl(*arguments)
        assert result.exit_code == 1
        assert "installed by" in result.output and named in result.output


def test_options_of_a_role_follow_it() -> None:
    result = edgectl("uninstall", "--purge", "agent")
    assert result.exit_code == 2
    assert "edgectl uninstall agent --purge" in result.output


def test_enabling_is_undone(tmp_path: Path) -> None:
    edgectl("install", "coordinator", "--plaintext", *BIN, "--root", str(tmp_path))
    link = tmp_path / "etc/systemd/system/multi-user.target.wants/edgeshard-coordinator.service"
    link.parent.mkdir()
    link.symlink_to("/etc/systemd/system/edgeshard-coordinator.service")
    assert edgectl("uninstall", "coordinator", "--root", str(tmp_path)).exit_code == 0
    assert not link.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("install", "agent", "--plaintext"), 2, "--name is required"),
        (("install", "agent", "--plaintext", "--name", "a/b"), 2, "name"),
        (("install", "agent", "--name", "a"), 2, "--credentials DIR is required"),
        (("install", "coordinator"), 2, "give --plaintext"),
        (
            ("install", "agent", "--plaintext", "--name", "a", "--coordinator", "10.0.0.2:7600"),
            4,
            "give --credentials DIR",
        ),
        (
            ("install", "coordinator", "--plaintext", "--listen", "0.0.0.0:7600"),
            4,
            "give --credentials DIR",
        ),
        (("install", "coordinator", "--plaintext", "--listen", "nonsense"), 2, "listen"),
        (("install", "coordinator", "--credentials", "/a b"), 2, "--credentials"),
    ],
)
def test_what_no_daemon_could_start_with_is_refused_and_nothing_laid_out(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = edgectl(*arguments, *BIN, "--root", str(tmp_path))
    assert result.exit_code == code and said in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_plaintext_is_said_on_the_command_line_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting for the user's own calls installs no service; an installed one is kept up without
    it."""
    where = ("--root", str(tmp_path))
    monkeypatch.setenv("EDGESHARD__CLIENT__PLAINTEXT", "1")
    assert edgectl("install", "agent", "--name", "a", *BIN, *where).exit_code == 2
    assert edgectl("install", "agent", "--plaintext", "--name", "a", *BIN, *where).exit_code == 0
    assert edgectl("install", "agent", *where).exit_code == 0


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    edgectl("install", "coordinator", "--plaintext", *BIN, "--root", str(tmp_path))
    record = tmp_path / "etc/edgeshard/coordinator.installed.json"
    record.write_text("{")
    result = edgectl("uninstall", "coordinator", "--root", str(tmp_path))
    assert result.exit_code == 1 and str(record) in result.stderr


def test_a_root_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = edgectl("install", "coordinator", "--root", str(tmp_path / "nothing"))
    assert result.exit_code == 2 and "--root" in result.stderr


def test_a_machine_without_systemd_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "_RUNS_SYSTEMD", tmp_path / "nothing")
    for command in ("install", "uninstall"):
        result = edgectl(command, "coordinator")
        assert result.exit_code == 1 and "--root DIR" in result.stderr


def test_only_root_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").touch(mode=0o755)
    monkeypatch.setattr(install, "_RUNS_SYSTEMD", programs)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = edgectl("uninstall", "coordinator")
    assert result.exit_code == 4 and "sudo" in result.stderr


def test_a_unit_names_the_programs_of_install_sh_by_the_link_that_stays(tmp_path: Path) -> None:
    programs = tmp_path / "versions" / "0.1.0-abc" / "bin"
    programs.mkdir(parents=True)
    assert install._lasting(programs) == programs
    (tmp_path / "current").symlink_to("versions/0.1.0-abc")
    assert install._lasting(programs) == tmp_path / "current" / "bin"
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("versions/0.2.0-def")
    assert install._lasting(programs) == programs


def test_a_coordinator_is_given_wheels(tmp_path: Path) -> None:
    tls = ("--credentials", "/etc/edgeshard/tls")
    result = edgectl(
        "install", "coordinator", "--wheels", "/srv/wheels", "--root", str(tmp_path), *tls, *BIN
    )
    assert result.exit_code == 0, result.output
    values = tomllib.loads((tmp_path / "etc/edgeshard/coordinator.toml").read_text())["coordinator"]
    assert values["wheels"] == "/srv/wheels"
