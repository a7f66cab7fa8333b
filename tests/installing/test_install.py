"""install.sh in an ordinary user's home: twice, over an older version, killed at each step, on a
full disk; removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installing.boxes import INSTALLER, PYTHON, Box, make_folder, tree
from tests.support.forms import DAYS, day

pytestmark = [pytest.mark.timing, pytest.mark.timeout(900)]

CHANGING = ("mkdir", "rm", "mv", "ln", "sync")
"""Programs that change the disk; the script is killed after each call of one."""


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "old", "0.1.0")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "new", "0.2.0")


def test_a_second_run_changes_nothing(box: Box, old: Path) -> None:
    box.install(old)
    before = tree(box.home)
    assert "installed already" in box.install(old)
    assert tree(box.home) == before
    assert box.version() == "0.1.0"


@pytest.mark.long
def test_an_upgrade_keeps_the_version_before_and_removes_older_ones(
    box: Box, old: Path, new: Path
) -> None:
    newest = make_folder(new.with_name("newest"), "0.3.0")
    for folder in (old, new, newest):
        box.install(folder)
    assert box.version() == "0.3.0"
    assert box.versions() == ["0.2.0", "0.3.0"]
    box.install(new)
    assert box.version() == "0.2.0"


@pytest.mark.long
def test_killed_after_each_step_leaves_what_works(box: Box, old: Path, new: Path) -> None:
    box.install(old)
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
    step = 1 if day() == 0 else DAYS
    kill_at, ends = 1 + day() % step - step, set()  # other steps each day
    while True:
        kill_at += step
        shutil.rmtree(box.home)
        shutil.copytree(kept, box.home, symlinks=True)
        count.write_text("")
        count.with_name("count.kill").write_text(str(kill_at))
        killed = box.run(new, "--wheels", new).returncode != 0
        ends.add(box.version())  # it runs, after each step
        count.with_name("count.kill").write_text("0")
        box.install(new)
        assert box.version() == "0.2.0"
        assert box.versions() == ["0.1.0", "0.2.0"]
        assert not (box.prefix / "current.new").is_symlink()
        if not killed:
            break
    assert kill_at > 6
    assert ends == {"0.1.0", "0.2.0"}


@pytest.mark.long
def test_killed_within_pip_leaves_what_works(box: Box, old: Path, new: Path) -> None:
    box.install(old)
    process = subprocess.Popen(
        box.command(new, "--wheels", new),
        env=box.environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    begun = box.prefix / "versions"
    while process.poll() is None and not list(begun.glob("0.2.0-*/bin/python")):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    assert box.version() == "0.1.0"
    assert not list(begun.glob("0.2.0-*/installed"))
    assert "did not finish" in box.install(new)
    assert box.version() == "0.2.0"


def test_a_terminated_run_removes_what_it_began(box: Box, old: Path, new: Path) -> None:
    box.install(old)
    before = tree(box.home)
    box.wrap(PYTHON, 'REAL "$@"; code=$?; case "$*" in *venv*) kill $PPID ;; esac; exit $code')
    assert box.run(new, "--wheels", new).returncode == 130
    assert tree(box.home) == before


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_leaves_what_was_there(box: Box, old: Path) -> None:
    large = make_folder(box.directory / "large", "0.2.0", padding=16 << 20)
    with small_disk(box.prefix, "40m"):
        box.install(old)
        before = tree(box.home)
        said = box.run(large, "--wheels", large)
        assert said.returncode == 1
        assert "bytes are needed on the disk of" in said.stderr
        # Somebody else fills it, once the script has looked.
        box.wrap(
            "df",
            f'REAL "$@"; dd if=/dev/zero of={box.prefix}/versions/filler bs=1M count=20 '
            "2>/dev/null",
        )
        middling = make_folder(box.directory / "middling", "0.3.0", padding=4 << 20)
        said = box.run(middling, "--wheels", middling)
        assert said.returncode == 1
        assert "nothing was changed" in said.stderr
        assert box.version() == "0.1.0"
        (box.prefix / "versions" / "filler").unlink()
        assert tree(box.home) == before


def test_nobody_elses_directory_is_taken(box: Box, old: Path) -> None:
    box.prefix.mkdir(parents=True)
    (box.prefix / "diary").write_text("mine")
    result = box.run(old, "--wheels", old)
    assert result.returncode == 1
    assert "not of this script" in result.stderr
    assert tree(box.prefix) == ["diary"]


def test_two_runs_do_not_meet(box: Box, old: Path) -> None:
    box.install(old)
    holder = subprocess.Popen(
        ["flock", box.prefix / ".edgeshard-prefix", "sh", "-c", "echo held; read _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    result = box.run(old, "--wheels", old)
    holder.communicate(b"\n")
    assert result.returncode == 1
    assert "another install.sh" in result.stderr


@pytest.mark.parametrize("what", ["edgeshard", "pip"])
def test_a_changed_wheel_is_refused(box: Box, old: Path, what: str) -> None:
    (wheel,) = old.glob(f"{what}-*.whl")
    with wheel.open("ab") as file:
        file.write(b"more")
    result = box.run(old, "--wheels", old)
    assert result.returncode == 1
    assert not box.edgectl.exists()
    assert not (box.prefix / "current").exists()
    assert not list((box.prefix / "versions").iterdir())


def test_a_folder_of_another_machine_or_python_is_refused_by_name(
    box: Box, old: Path, tmp_path: Path
) -> None:
    other = make_folder(tmp_path / "other", "0.1.0")
    (other / "edgeshard-0.1.0-py3-none-any.whl").rename(
        other / "edgeshard-0.1.0-py3-none-manylinux_2_28_riscv64.whl"
    )
    assert "no EdgeShard for" in box.run(other, "--wheels", other).stderr
    (old / "numpy-2.4.0-cp399-cp399-manylinux_2_28_x86_64.whl").touch()
    assert "no Python 3.99 was found" in box.run(old, "--wheels", old).stderr
    assert not box.prefix.exists()


def test_joining_takes_the_token_from_standard_input_and_leaves_no_lock(
    box: Box, old: Path
) -> None:
    wheels = shutil.copytree(old, box.directory / "fetched")
    said = box.install(
        wheels, "--delete-wheels", "--join", "-", "--", "--memory", "2GiB", said="edgeshard2-abc\n"
    )
    assert "joins by edgeshard2-abc with --memory 2GiB" in said
    assert not wheels.exists()


def test_remove_keeps_state_and_purge_leaves_nothing(box: Box, old: Path) -> None:
    before = tree(box.home)
    box.install(old)
    state = box.home / ".local" / "state" / "edgeshard" / "b"
    settings = box.home / ".config" / "edgeshard"
    for folder in (state, settings):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    assert box.run(old, "remove").returncode == 0
    assert not box.prefix.exists() and not box.edgectl.is_symlink()
    assert (state / "file").exists() and (settings / "file").exists()
    box.install(old)
    refused = box.run(old, "purge", said="no\n")
    assert refused.returncode == 1 and box.version() == "0.1.0"
    assert box.run(old, "purge", said="yes\n").returncode == 0
    assert tree(box.home) == before


def test_remove_of_a_given_prefix_leaves_nothing(box: Box, old: Path) -> None:
    prefix = box.directory / "own"
    box.install(old, "--prefix", prefix)
    assert (prefix / "bin" / "edgectl").exists()
    assert box.run(old, "remove", "--prefix", prefix).returncode == 0
    assert not prefix.exists()


def test_help_and_wrong_options_change_nothing(box: Box, old: Path) -> None:
    assert "--wheels DIR" in box.run(old, "--help").stdout
    for wrong in (
        ["--wheel", "x"],
        ["--wheels"],
        ["--wheels", "a", "--index", "b"],
        ["--delete-wheels"],
        ["--prefix", "a b"],
    ):
        assert box.run(old, *wrong).returncode == 1
    assert tree(box.home) == []


def test_the_script_is_short_enough_to_be_read() -> None:
    lines = INSTALLER.read_text().splitlines()
    assert len(lines) <= 400
    assert max(map(len, lines)) <= 120
