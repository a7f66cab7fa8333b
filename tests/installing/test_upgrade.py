"""edgectl upgrade and edgectl uninstall of an installation by install.sh, in an ordinary user's
home."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeshard.domain.identity import Role
from tests.installing.boxes import Box, make_folder, tree
from tests.support.forms import DAYS, day
from tests.support.membership import SecureSite
from tools.release.archives import Entry, write_tar

pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]

AS_INSTALLED = """\
import sys
from pathlib import Path
sys.prefix = str(Path(sys.argv.pop(1)).resolve())
from edgeshard.cli.main import main
main()
"""
"""edgectl of this checkout, in the environment that its first argument names."""
HERE = f"{platform.machine()}-py{sys.version_info[0]}{sys.version_info[1]}-cpu"
CHANGING = ("mkdir", "cp", "rm", "mv", "ln", "sync")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    box = Box(tmp_path)
    box.install(make_folder(tmp_path / "old", "0.1.0"))
    return box


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "new", "0.2.0")


def edgectl(box: Box, *arguments: str | Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run the checkout's edgectl as the one that is installed in the box."""
    user = ["unshare", "--user", "--map-user=1000"] if os.geteuid() == 0 else []
    program = [sys.executable, "-c", AS_INSTALLED, str(box.prefix / "current")]
    return subprocess.run(
        [*user, *program, *map(str, arguments)],
        env=box.environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=box.directory,
        start_new_session=True,
    )


def pack(folder: Path) -> Path:
    """A bundle of a folder, as `make bundle` lays it out."""
    bundle = folder.with_suffix(".tar")
    with bundle.open("wb") as file:
        write_tar(file, [Entry(path.name, path) for path in folder.iterdir()], 0, f"{folder.name}/")
    return bundle


def test_a_bundle_is_installed_and_the_version_before_returns(box: Box, new: Path) -> None:
    first = edgectl(box, "upgrade", "--back")
    assert first.returncode == 1
    assert "no version before" in first.stderr
    result = edgectl(box, "upgrade", "--from", pack(new))
    assert result.returncode == 0, result.stdout + result.stderr
    assert box.version() == "0.2.0"
    assert not (box.home / ".cache").exists() or tree(box.home / ".cache") == []
    for version in ("0.1.0", "0.2.0"):
        result = edgectl(box, "upgrade", "--back")
        assert result.returncode == 0, result.stdout + result.stderr
        assert box.version() == version
    assert box.versions() == ["0.1.0", "0.2.0"]


def test_a_bundle_with_one_changed_byte_changes_nothing(box: Box, new: Path) -> None:
    bundle = pack(new)
    content = bundle.read_bytes()
    before = tree(box.home)
    for position in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 0x01
        bundle.write_bytes(changed)
        result = edgectl(box, "upgrade", "--from", bundle)
        assert result.returncode in (1, 2), (position, result.stdout)
        assert result.stderr.splitlines()[-1].startswith("error: "), result.stderr
        assert tree(box.home) == before
        assert box.version() == "0.1.0"


@pytest.mark.long
@pytest.mark.parametrize("back", [False, True])
def test_an_upgrade_killed_after_each_step_leaves_a_version(
    box: Box, new: Path, back: bool
) -> None:
    bundle = pack(new)
    if back:
        assert edgectl(box, "upgrade", "--from", bundle).returncode == 0
    start = "0.2.0" if back else "0.1.0"
    end = "0.1.0" if back else "0.2.0"
    arguments = ("upgrade", "--back") if back else ("upgrade", "--from", bundle)
    kept = box.directory / "kept"
    shutil.copytree(box.home, kept, symlinks=True)
    count = box.directory / "count"
    for program in CHANGING:
        box.wrap(
            program,
            (
                f'REAL "$@"; code=$?; echo >> {count}\n'
                # the whole group
                f'[ $(wc -l < {count}) -ne "$(cat {count}.kill)" ] || kill -9 0\n'
                "exit $code"
            ),
        )
    step = 1 if day() == 0 or back else DAYS
    kill_at = 1 + day() % step - step  # other steps each day
    ends = set()
    while True:
        kill_at += step
        shutil.rmtree(box.home)
        shutil.copytree(kept, box.home, symlinks=True)
        count.write_text("")
        count.with_name("count.kill").write_text(str(kill_at))
        killed = edgectl(box, *arguments).returncode != 0
        found = box.version()
        ends.add(found)
        count.with_name("count.kill").write_text("0")
        if not back or found == start:
            result = edgectl(box, *arguments)
            assert result.returncode == 0, result.stdout + result.stderr
        assert box.version() == end
        if not killed:
            break
    assert kill_at > 3
    assert ends == {start, end}


def test_uninstall_keeps_state_and_purge_leaves_nothing(box: Box, tmp_path: Path) -> None:
    state = box.home / ".local" / "state" / "edgeshard" / "b"
    settings = box.home / ".config" / "edgeshard"
    cache = box.home / ".cache" / "edgeshard" / "wheels"
    for folder in (state, settings, cache):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    shutil.rmtree(tmp_path / "old")  # the folder that it was installed from
    dry = edgectl(box, "uninstall", "--purge", "--dry-run")
    assert dry.returncode == 0 and "install.sh purge" in dry.stdout
    assert box.version() == "0.1.0"
    result = edgectl(box, "uninstall")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not box.prefix.exists() and not box.edgectl.is_symlink()
    assert (state / "file").exists() and (settings / "file").exists()
    box.install(make_folder(tmp_path / "old", "0.1.0"))
    refused = edgectl(box, "uninstall", "--purge", typed="no\n")
    assert refused.returncode == 1 and box.version() == "0.1.0"
    assert edgectl(box, "uninstall", "--purge", "--yes").returncode == 0
    assert tree(box.home) == []


@pytest.mark.long
def test_an_own_prefix_is_upgraded_and_removed(tmp_path: Path, new: Path) -> None:
    box = Box(tmp_path)
    own = tmp_path / "own"
    box.install(make_folder(tmp_path / "old", "0.1.0"), "--prefix", own)
    (box.home / ".local" / "share").mkdir(parents=True)
    box.prefix.symlink_to(own)
    assert edgectl(box, "upgrade", "--from", new).returncode == 0
    shown = subprocess.check_output([own / "bin" / "edgectl", "--version"], text=True)
    assert shown == "edgectl 0.2.0\n"
    assert edgectl(box, "uninstall").returncode == 0
    assert not own.exists()


async def test_a_node_takes_the_version_of_its_site(tmp_path: Path) -> None:
    box = Box(tmp_path)
    state = box.home / ".local" / "state" / "edgeshard" / "b"
    wheels = tmp_path / "wheels"
    make_folder(wheels / HERE, "0.2.0")
    await asyncio.to_thread(box.install, make_folder(tmp_path / "old", "0.1.0"))
    async with SecureSite(tmp_path, "--wheels", str(wheels)) as mill, mill.client_of() as admin:
        address = (await admin.create_token(Role.AGENT, "c")).packages
        files = mill.identities.of(Role.AGENT, "b")
        shutil.copytree(files.ca.parent, state / "pki")
        coordinator = mill.coordinator.address
        (state / "agent.toml").write_text(f'[agent]\ncoordinator = "{coordinator}"\n')
        result = await asyncio.to_thread(edgectl, box, "upgrade")
        assert result.returncode == 0, result.stdout + result.stderr
        assert box.version() == "0.2.0"
        again = await asyncio.to_thread(edgectl, box, "upgrade", "--from", f"https://{address}")
        assert again.returncode == 0 and "nothing to do" in again.stderr
        entries = [(entry.who, entry.what) for entry in await admin.audit()]
        assert ("agent/b", "FetchWheel") in entries
    assert not (box.home / ".cache" / "edgeshard").exists()
