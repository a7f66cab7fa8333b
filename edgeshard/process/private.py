"""Privacy of a process's output: only its owner can read its files and directories, and its memory
is not dumped."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import structlog

from edgeshard.domain.errors import InvalidArgumentError

log = structlog.get_logger()


def keep_private() -> None:
    """Let this process and its children make files that only their owner can read, and no core,
    which would hold prompts.

    To analyse a crash, raise the limit again: prlimit --core=unlimited --pid PID.
    """
    import resource  # missing if only edgectl runs, on a system without it

    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def private_directory(path: Path, option: str) -> None:
    """Make a directory for only its owner; remove others' rights from an existing one.

    Raises OSError if it cannot be made, InvalidArgumentError naming `option` if others' rights
    cannot be removed.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    if mode & stat.S_ISVTX:
        raise InvalidArgumentError(
            f"--{option} {path} is a directory for all users (mode {mode:04o}); give one below it",
            field=option,
        )
    try:
        path.chmod(mode & ~0o077)
    except PermissionError:
        raise InvalidArgumentError(
            f"--{option} {path} is open to others (mode {mode:04o}) and belongs to another user: "
            f"run chmod 700 {path} "
            "as that user, or give another directory",
            field=option,
        ) from None
    log.warning("directory_made_private", path=str(path), mode_was=f"{mode:04o}")


def open_private(path: str, flags: int) -> int:
    """Open a file as an `opener` of `open`; only its owner can read a new file."""
    return os.open(path, flags, 0o600)
