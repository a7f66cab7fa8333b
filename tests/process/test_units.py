"""The units: systemd's verdict on them, if it is installed, and the copies for reading in
deploy/systemd."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeshard.process.systemd_units import Daemon, unit_text

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
HIGHEST_EXPOSURE = 3.0
needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="there is no systemd-analyze: the units are not checked",
)


@pytest.fixture(
    params=[(daemon, tls) for daemon in Daemon for tls in ("", "/etc/edgeshard/tls")], ids=str
)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit whose program is there."""
    daemon, tls = request.param
    path = tmp_path / f"{daemon.unit}.service"
    path.write_text(unit_text(daemon, sys.executable, f"/etc/edgeshard/{daemon}.toml", tls))
    return path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@needs_analyze
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path) -> None:
    result = analyze("verify", "--man=no", str(unit))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_analyze
def test_a_unit_exposes_little(unit: Path) -> None:
    result = analyze(
        "security", "--offline=true", f"--threshold={round(10 * HIGHEST_EXPOSURE)}", str(unit)
    )
    assert result.returncode == 0, result.stdout
    assert "Overall exposure level" in result.stdout


@needs_analyze
def test_a_unit_that_is_wrong_or_exposes_much_fails(tmp_path: Path) -> None:
    """The two tests above would notice."""
    path = tmp_path / "edgeshard-open.service"
    path.write_text(f"[Service]\nExecStart={sys.executable}\nNoNewPriviliges=yes\n")
    assert "NoNewPriviliges" in analyze("verify", "--man=no", str(path)).stderr
    assert analyze("security", "--offline=true", "--threshold=30", str(path)).returncode != 0


@pytest.mark.parametrize("daemon", Daemon)
def test_the_copies_for_reading_are_what_edgectl_lays_out(daemon: Daemon) -> None:
    text = unit_text(
        daemon,
        f"/opt/edgeshard/bin/{daemon.unit}",
        f"/etc/edgeshard/{daemon}.toml",
        "/etc/edgeshard/tls",
    )
    assert (DEPLOY / f"{daemon.unit}.service").read_text() == text, (
        f"write it again: edgectl install {daemon} --root DIR --bin /opt/edgeshard/bin "
        "--credentials /etc/edgeshard/tls"
    )


@pytest.mark.parametrize("daemon", Daemon)
def test_credentials_come_from_systemd_and_only_where_there_are_any(daemon: Daemon) -> None:
    assert "LoadCredential" not in unit_text(daemon, "/bin/x", "/etc/x.toml", "")
    with_tls = unit_text(daemon, "/bin/x", "/etc/x.toml", "/keys")
    assert "LoadCredential=key.pem:/keys/key.pem\n" in with_tls
    assert "--tls-key ${CREDENTIALS_DIRECTORY}/key.pem" in with_tls


@pytest.mark.parametrize("daemon", list(Daemon))
def test_a_daemon_may_list_the_interfaces_of_its_machine(daemon: Daemon) -> None:
    """Which is by netlink: without a route, a coordinator finds its own address so."""
    text = (DEPLOY / f"{daemon.unit}.service").read_text()
    (families,) = (
        line for line in text.splitlines() if line.startswith("RestrictAddressFamilies=")
    )
    assert "AF_NETLINK" in families.split("=")[1].split()
