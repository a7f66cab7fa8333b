"""The sources of the native library: a library of other sources is not called. `hatch_build.py` runs this file too."""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = Path(__file__).with_name("kernels")


def digest() -> str:
    """SHA-256 of the kernels' sources, their names included."""
    found = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
