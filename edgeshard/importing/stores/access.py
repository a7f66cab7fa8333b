"""Files that belong to another user: the error that names the owner and the commands that let this
user read them."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from edgeshard.domain.errors import DeniedError, EdgeShardError, NotFoundError, UnavailableError

SMALL_FILE_BYTES = 1 << 20
"""The most bytes of a manifest, a template or settings; real ones have some kilobytes."""


def denied(program: str, folder: Path, path: Path) -> DeniedError:
    """The error for a `path` of `program`'s folder that this user may not read."""
    refused = path
    for parent in reversed(path.parents):
        if not os.access(parent, os.X_OK, effective_ids=True):
            refused = parent
            break
    user = _user_name(os.geteuid())
    commands = [f"sudo setfacl -R -m u:{user}:rX {folder}"]
    if folder.is_relative_to(refused) and refused != folder:
        commands.insert(0, f"sudo setfacl -m u:{user}:x {refused}")
    return DeniedError(
        f"{refused} belongs to the user {_owner(refused)}, and {user} may not read it: to read "
        f"{program}'s models in place, run `{' && '.join(commands)}`",
        field="model",
        reason="STORE_NOT_READABLE",
    )


def not_readable(program: str, folder: Path, path: Path, error: OSError) -> EdgeShardError:
    """The typed error for an error of the file system at `path`."""
    if isinstance(error, PermissionError):
        return denied(program, folder, path)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFoundError(
            f"{path} of {program}'s models is missing; fetch the model again", field="model"
        )
    return UnavailableError(
        f"{path} of {program}'s models cannot be read: {error.strerror}", field="model"
    )


def _owner(path: Path) -> str:
    try:
        return _user_name(path.stat().st_uid)
    except OSError:
        return "unknown"


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
