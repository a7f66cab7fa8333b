"""The order in which Python searches for packages, for the programs that EdgeShard installs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_OWN = ("edgeshard", "edgeshard_agent", "edgeshard_coordinator")
_VARIABLE = "PYTHONPATH"


def prefer_installed() -> None:
    """Search the folders of PYTHONPATH last: other software sets it, and old packages there shadow installed ones.

    Call it before anything but the standard library and this package is imported. A folder that EdgeShard itself is in
    keeps its place.
    """
    sys.path[:] = installed_first(sys.path, os.environ)


def installed_first(path: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """`path` with the folders of PYTHONPATH after all others, except those that hold a package of EdgeShard."""
    folders = environment.get(_VARIABLE, "").split(os.pathsep)
    foreign = {Path(folder).resolve() for folder in folders if folder and not _holds_own(folder)}
    first = [folder for folder in path if Path(folder).resolve() not in foreign]
    last = [folder for folder in path if Path(folder).resolve() in foreign]
    return first + last


def _holds_own(folder: str) -> bool:
    return any((Path(folder) / name / "__init__.py").exists() for name in _OWN)
