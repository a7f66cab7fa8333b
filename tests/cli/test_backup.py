"""edgectl backup, restore and set-coordinator on files; tests/system/test_restored_site.py runs a
site."""

from __future__ import annotations

import fcntl
import json
import shutil
import sqlite3
import tarfile
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.values.state import Timings
from typer.testing import CliRunner

from edgeshard.cli.main import app
from edgeshard.process import installation
from edgeshard.process.installation import InstallOptions, Record

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directories, empty."""
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("EDGESHARD__CLIENT__PLAINTEXT")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edgectl(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: str | Path) -> str:
    result = edgectl(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


@pytest.fixture
async def mill(home: Path) -> Path:
    """The state directory of a site that edgectl init made, as its coordinator leaves it."""
    done("init", "mill", "--listen", "127.0.0.1:7600", "--http-listen", "127.0.0.1:8000")
    done("certificate", "agent", "a")
    state = home / "state/edgeshard/coordinator"
    store = StateStore(state / "state.sqlite")
    await store.open("one", Timings())
    await store.close()
    (state / "audit").mkdir()
    (state / "audit/operators.jsonl").write_text("{}\n")
    (state / "models/blobs").mkdir(parents=True)
    (state / "models/names.json").write_text(json.dumps({"tiny": DIGEST}))
    (state / "models/blobs/weights").write_bytes(b"w" * 100)
    with (home / "pki/coordinator.toml").open("a") as config:
        config.write(f'quotas = "{home}/limits.toml"\ncertificate_life = 86400\n')
    (home / "limits.toml").write_text("[default]\n")
    return state


def term(state: Path) -> int:
    with closing(sqlite3.connect(state / "state.sqlite")) as database:
        return int(database.execute("SELECT number FROM term").fetchone()[0])


def test_a_site_is_restored_in_other_directories(mill: Path, home: Path) -> None:
    printed = done("backup", "mill.backup")
    assert "site mill" in printed and "weights of tiny" in printed
    assert (home / "mill.backup").stat().st_mode & 0o777 == 0o600
    with tarfile.open("mill.backup") as tar:
        names = tar.getnames()
    assert {
        "site/ca.key",
        "site/a/key.pem",
        "site/quotas.toml",
        "state/audit/operators.jsonl",
    } <= set(names)
    assert not any("weights" in name or "wal" in name or "lock" in name for name in names)
    printed = done("restore", "mill.backup", "-d", "again", "--state-dir", "other/state")
    assert "edgectl node revoke" in printed and "edgectl set-coordinator" in printed
    assert f"--name tiny (manifest sha256 {DIGEST})" in printed
    assert f"edgeshard-coordinator --config {home}/again/coordinator.toml\n" in printed
    for name in ("ca.key", "ca.pem", "site", "admin/key.pem", "coordinator/cert.pem", "a/key.pem"):
        assert (home / "again" / name).read_bytes() == (home / "pki" / name).read_bytes()
    assert (home / "again/quotas.toml").read_text() == "[default]\n"
    values = tomllib.loads((home / "again/coordinator.toml").read_text())["coordinator"]
    assert values == {
        "listen": "127.0.0.1:7600",
        "enrol_listen": "127.0.0.1:7601",
        "http_listen": "127.0.0.1:8000",
        "certificate_life": 86400,
        "state_dir": f"{home}/other/state",
        "tls_ca": "coordinator/ca.pem",
        "tls_cert": "coordinator/cert.pem",
        "tls_key": "coordinator/key.pem",
        "ca_key": "ca.key",
        "quotas": "quotas.toml",
    }
    for path in (home / "again", home / "other/state", *(home / "again").rglob("*")):
        assert not path.stat().st_mode & 0o077, path
    assert {path.name for path in home.iterdir() if path.name.startswith(".")} == set()


def test_the_term_is_above_all_that_the_site_had(mill: Path, home: Path) -> None:
    """A coordinator takes one more at each start, and may have been restored from the same backup
    before."""
    done("backup", "mill.backup")
    done("restore", "mill.backup", "-d", "again", "--state-dir", "first")
    assert term(home / "first") > term(mill) + 1_000_000
    done("backup", "second.backup", "--config", "again/coordinator.toml")
    with closing(sqlite3.connect("first/state.sqlite", isolation_level=None)) as database:
        database.execute("UPDATE term SET number = number + 4000000000")
    done("backup", "--force", "second.backup", "--config", "again/coordinator.toml")
    done("restore", "second.backup", "-d", "third", "--state-dir", "second")
    assert term(home / "second") > term(home / "first")


def test_a_backup_that_exists_is_replaced_by_force_only(mill: Path, home: Path) -> None:
    (home / "mill.backup").write_text("mine")
    result = edgectl("backup", "mill.backup")
    assert result.exit_code == 1 and "--force" in result.output
    assert (home / "mill.backup").read_text() == "mine"
    done("backup", "mill.backup", "--force")


def test_directories_in_use_or_not_empty_are_refused(mill: Path, home: Path) -> None:
    done("backup", "mill.backup")
    with (mill / "state.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = edgectl("restore", "mill.backup", "-d", "again")
    assert result.exit_code == 1 and "in use by a coordinator" in result.output
    result = edgectl("restore", "mill.backup", "-d", "again")
    assert result.exit_code == 1 and "not an empty directory" in result.output
    result = edgectl("restore", "mill.backup", "--state-dir", "other")
    assert result.exit_code == 1 and f"{home}/pki is not an empty directory" in result.output
    assert not (home / "again").exists() and not (home / "other").exists()
    (home / "again").mkdir()
    done("restore", "mill.backup", "-d", "again", "--state-dir", "other")


def test_a_changed_byte_changes_nothing(mill: Path, home: Path) -> None:
    done("backup", "mill.backup")
    content = (home / "mill.backup").read_bytes()
    where = content.index(b"BEGIN CERTIFICATE") + 40
    (home / "mill.backup").write_bytes(
        content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :]
    )
    before = sorted(home.rglob("*"))
    result = edgectl("restore", "mill.backup", "-d", "again", "--state-dir", "other")
    assert result.exit_code == 1 and "use another copy" in result.output
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("PRAGMA user_version=99", "newer edgeshard-coordinator"),
        ("DROP TABLE term", "is not a coordinator's state"),
    ],
)
def test_a_state_that_no_coordinator_could_open_is_not_put_in_place(
    mill: Path, home: Path, statement: str, said: str
) -> None:
    with closing(sqlite3.connect(mill / "state.sqlite", isolation_level=None)) as database:
        database.execute(statement)
    done("backup", "mill.backup")
    result = edgectl("restore", "mill.backup", "-d", "again", "--state-dir", "other")
    assert result.exit_code == 1 and said in result.output
    assert not (home / "again").exists() and not (home / "other").exists()


def test_a_site_of_edgectl_serve_is_restored_as_one_folder(mill: Path, home: Path) -> None:
    served = home / "served"
    (served / "site").mkdir(parents=True)
    for name in ("ca.key", "ca.pem"):
        (served / "site" / name).write_bytes((home / "pki" / name).read_bytes())
    mill.rename(served / "coordinator")
    (served / "api-key").write_text("key\n")
    (served / "box").mkdir()
    (served / "box/node-id").write_text("id\n")
    done("backup", "site.backup", "--state-dir", served)
    printed = done("restore", "site.backup", "--state-dir", "again")
    assert f"edgectl serve MODEL --state-dir {home}/again" in printed
    for name in ("site/ca.key", "api-key", "box/node-id", "coordinator/audit/operators.jsonl"):
        assert (home / "again" / name).read_bytes() == (served / name).read_bytes()


@pytest.mark.parametrize("has_record", [True, False], ids=["edgectl install", "Debian package"])
def test_the_installed_coordinator_is_found(
    mill: Path, home: Path, monkeypatch: pytest.MonkeyPatch, has_record: bool
) -> None:
    """Its unit names the credentials, which the file of settings does not."""
    etc = home / "etc"
    etc.mkdir()
    monkeypatch.setattr(installation, "config_path", lambda daemon: str(etc / f"{daemon}.toml"))
    monkeypatch.setattr(
        installation, "record_path", lambda daemon: str(etc / f"{daemon}.installed.json")
    )
    monkeypatch.setattr(installation, "state_directory", lambda daemon: str(mill))
    (etc / "coordinator.toml").write_text('[coordinator]\nlisten = "127.0.0.1:7600"\n')
    shutil.copytree(home / "pki/coordinator", etc / "tls")
    (home / "pki").rename(home / "site")
    if has_record:
        options = InstallOptions(
            "127.0.0.1:7600",
            "/bin",
            credentials=f"{home}/site/coordinator",
            ca_key=f"{home}/site/ca.key",
        )
        record = installation.to_text(Record(options))
        (etc / "coordinator.installed.json").write_text(record)
    printed = done("backup", "mill.backup")
    assert "site mill" in printed and ("the authority's key" in printed) is not has_record
    done("restore", "mill.backup", "--state-dir", "other")
    assert (home / "pki/coordinator/key.pem").read_bytes() == (
        home / "site/coordinator/key.pem"
    ).read_bytes()
    assert (home / "pki/ca.key").exists() is has_record


def test_without_a_site_the_error_names_the_options(home: Path) -> None:
    result = edgectl("backup", "mill.backup")
    assert (
        result.exit_code == 3
        and "--config FILE" in result.output
        and "--state-dir" in result.output
    )
    result = edgectl("backup", "mill.backup", "--config", "absent.toml")
    assert result.exit_code == 2 and "absent.toml" in result.output
    result = edgectl("restore", "absent")
    assert result.exit_code == 2 and "absent cannot be read" in result.output


def test_a_file_that_cannot_be_written_is_a_typed_error(mill: Path, home: Path) -> None:
    result = edgectl("backup", "absent/mill.backup")
    assert result.exit_code == 4 and "No such file or directory" in result.output


def test_the_address_changes_and_all_else_stays(mill: Path, home: Path) -> None:
    agent = home / "state/edgeshard/a/agent.toml"
    agent.parent.mkdir()
    agent.write_text(
        '# mine\n[agent]\nname = "a"\ncoordinator = "10.0.0.2:7600"\nlisten = "10.0.0.3:7610"\n'
    )
    agent.chmod(0o600)
    printed = done("set-coordinator", "10.0.0.9:7601")
    restart = printed.splitlines()[-1].split()
    assert shutil.which(restart[0]) and restart[1:] == ["--config", str(agent)]
    assert agent.read_text() == (
        '# mine\n[agent]\nname = "a"\ncoordinator = "10.0.0.9:7601"\nlisten = "10.0.0.3:7610"\n'
    )
    assert agent.stat().st_mode & 0o777 == 0o600
    client = tomllib.loads((home / "config/edgeshard/client.toml").read_text())["client"]
    assert client["coordinator"] == "10.0.0.9:7601" and client["tls_key"].endswith("admin/key.pem")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 2, "has no line"),
        ('[agent]\nname = "a"\n', 2, "has no line"),
        ('[other]\ncoordinator = "x"\n', 2, "has no line"),
        ("[agent", 2, "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_changed_stays(home: Path, text: str, code: int, said: str) -> None:
    (home / "agent.toml").write_text(text)
    result = edgectl("set-coordinator", "10.0.0.9:7600", "--config", "agent.toml")
    assert result.exit_code == code and said in result.output
    assert (home / "agent.toml").read_text() == text


def test_an_address_without_a_port_is_refused(home: Path) -> None:
    assert edgectl("set-coordinator", "10.0.0.9").exit_code == 2
    result = edgectl("set-coordinator", "10.0.0.9:7600")
    assert result.exit_code == 3 and "--config FILE" in result.output
