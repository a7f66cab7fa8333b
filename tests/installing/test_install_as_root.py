"""install.sh as root, in a mount namespace whose system files are on a temporary layer."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.installing.boxes import Box, make_folder

DIRECTORIES = ("/etc", "/opt", "/usr/local", "/var", "/root")
LAYERED = """\
set -e
mount -t tmpfs tmpfs {layers}
for directory in {directories}; do
    upper={layers}/$directory/upper work={layers}/$directory/work
    mkdir -p $upper $work
    mount -t overlay overlay -o lowerdir=$directory,upperdir=$upper,workdir=$work $directory
done
echo layered
"""
_SHOWN = (
    "find /opt/edgeshard /usr/local/bin/edgectl /etc/edgeshard /var/lib/edgeshard-agent "
    "2>/dev/null | sort | head -n 9"
)


def in_layers(box: Box, script: str) -> str:
    """The output of a shell script, as root, without its changes."""
    layers = box.directory / "layers"
    layers.mkdir(exist_ok=True)
    whole = LAYERED.format(layers=layers, directories=" ".join(DIRECTORIES)) + script
    environment = {
        "HOME": str(box.home),
        "PATH": f"{box.path}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", whole]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, cwd=box.directory
    )
    if "layered" not in done.stdout:
        pytest.skip(f"this system mounts no layers: {done.stderr.strip()[:200]}")
    return done.stdout + done.stderr


pytestmark = [
    pytest.mark.timing,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root installs as root"),
]


def test_root_installs_for_all_removes_and_purges(tmp_path: Path) -> None:
    box, folder = Box(tmp_path), make_folder(tmp_path / "wheels", "0.1.0")
    script = shlex.quote(str(folder / "install.sh"))
    said = in_layers(
        box,
        f"""
sh {script} --wheels {folder} >/dev/null
edgectl --version
readlink /usr/local/bin/edgectl
mkdir -p /etc/edgeshard /var/lib/edgeshard-agent
echo '{{"programs": "/opt/edgeshard/current/bin"}}' > /etc/edgeshard/agent.installed.json
sh {script} remove >/dev/null
echo removed; {_SHOWN}
sh {script} purge --yes >/dev/null
echo purged; {_SHOWN}
""",
    )
    _, version, link, *rest = said.splitlines()
    assert (version, link) == ("edgectl 0.1.0", "/opt/edgeshard/current/bin/edgectl")
    kept = ["/etc/edgeshard", "/etc/edgeshard/agent.installed.json", "/var/lib/edgeshard-agent"]
    assert rest == ["removed", *kept, "purged"]


def test_purge_leaves_what_another_installation_runs(tmp_path: Path) -> None:
    box, folder = Box(tmp_path), make_folder(tmp_path / "wheels", "0.1.0")
    said = in_layers(
        box,
        f"""
mkdir -p /etc/edgeshard
echo '{{"programs": "/srv/env/bin"}}' > /etc/edgeshard/agent.installed.json
sh {shlex.quote(str(folder / "install.sh"))} purge --yes || {_SHOWN}
""",
    )
    assert "is of another installation" in said
    assert "/etc/edgeshard/agent.installed.json\n" in said


def test_an_upgrade_restarts_the_services_of_this_installation_until_that_works(
    tmp_path: Path,
) -> None:
    """systemctl is a program of the test; tests/installing/test_bare_debian.py has systemd
    itself."""
    box, log = Box(tmp_path), tmp_path / "called.log"
    for name, version in (("old", "0.1.0"), ("new", "0.2.0")):
        make_folder(tmp_path / name, version)
    systemctl = f"""\
#!/bin/sh
echo "systemctl $* with $(edgectl --version)" >> {log}
[ -e {tmp_path}/works ] || exit 1
"""
    (box.path / "systemctl").write_text(systemctl)
    (box.path / "systemctl").chmod(0o755)
    old, new = (shlex.quote(str(tmp_path / name / "install.sh")) for name in ("old", "new"))
    said = in_layers(
        box,
        f"""
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /etc/edgeshard
sh {old} --wheels {tmp_path}/old >/dev/null
echo '{{"programs": "/opt/edgeshard/current/bin"}}' > /etc/edgeshard/agent.installed.json
echo '{{"programs": "/srv/env/bin"}}' > /etc/edgeshard/coordinator.installed.json
sh {new} --wheels {tmp_path}/new >/dev/null || echo failed
touch {tmp_path}/works
sh {new} --wheels {tmp_path}/new >/dev/null
sh {new} --wheels {tmp_path}/new >/dev/null
edgectl --version
""",
    )
    assert said.splitlines()[1:] == ["failed", "edgectl 0.2.0"], said
    assert log.read_text().splitlines() == 2 * [
        "systemctl try-restart edgeshard-agent with edgectl 0.2.0"
    ]
