"""Only its owner can read a daemon's files, whatever the umask and whatever was there."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.process.private import open_private, private_directory

NOBODY = 65534


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o750, 0o701, 0o2775])
def test_the_others_rights_to_a_directory_are_taken(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    private_directory(path, "state-dir")
    assert mode_of(path) == mode & ~0o077


def test_a_directory_is_made_private_and_a_private_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "of" / "the" / "site"
    private_directory(path, "state-dir")
    assert mode_of(path) == 0o700
    path.chmod(0o500)
    private_directory(path, "state-dir")
    assert mode_of(path) == 0o500


def test_a_directory_for_all_users_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    with pytest.raises(
        InvalidArgumentError, match=r"--state-dir .*mode 1777.*give one below it"
    ) as refused:
        private_directory(path, "state-dir")
    assert refused.value.field == "state-dir" and mode_of(path) == 0o1777


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a directory that belongs to another user"
)
def test_an_open_directory_of_another_user_is_refused_with_what_to_run(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; os.setgroups([]); os.setgid(int(sys.argv[2])); "
        "os.setuid(int(sys.argv[2]))\n"
        "private_directory(pathlib.Path(sys.argv[1]), 'state-dir')"
    )
    # tmp_path is below a directory that only root may enter
    path = Path("/tmp") / f"edgeshard-of-root-{os.getpid()}"
    path.mkdir()
    try:
        path.chmod(0o755)
        # Imported before: only root may be able to read the modules.
        done = subprocess.run(
            [sys.executable, "-c", "from edgeshard.process.private import "
                                   f"private_directory\n{program}", path,
             str(NOBODY)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert f"run chmod 700 {path}" in done.stderr and "InvalidArgumentError" in done.stderr
        assert mode_of(path) == 0o755
    finally:
        path.rmdir()


def test_a_process_that_keeps_private_makes_private_files_and_leaves_no_core(
    tmp_path: Path,
) -> None:
    program = """
import pathlib, resource, sys
from edgeshard.process.private import keep_private
keep_private()
pathlib.Path(sys.argv[1]).write_text("words")
pathlib.Path(sys.argv[2]).mkdir()
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    made = tmp_path / "file", tmp_path / "directory"

    def loosened() -> None:
        os.umask(0)
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))

    done = subprocess.run(
        [sys.executable, "-c", program, *made], capture_output=True, text=True, timeout=60,
        check=True, preexec_fn=loosened,
    )  # fmt: skip
    assert [mode_of(path) for path in made] == [0o600, 0o700]
    assert done.stdout.strip() == f"(0, {most})", (
        "it can be raised again by whoever looks for a crash"
    )


def test_a_file_that_is_opened_privately_keeps_the_mode_it_has(tmp_path: Path) -> None:
    for name in ("new", "old"):
        path = tmp_path / name
        if name == "old":
            path.touch(mode=0o644)
            path.chmod(0o644)
        with open(path, "w", opener=open_private) as file:
            file.write("words")
        assert mode_of(path) == (0o644 if name == "old" else 0o600)
