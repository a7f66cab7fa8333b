"""The native library and what it was made of: one of other sources is not called. `hatch_build.py` runs this, too."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

LIBRARY = Path(__file__).with_name("libedgeshard_ops.so")
SOURCES = Path(__file__).with_name("kernels")


def digest() -> str:
    """SHA-256 of the kernels' sources, their names included."""
    found = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def kernel_set() -> str:
    """By what the library beside this file was made: compiler, version, options that decide about bits; "" without."""
    try:
        told = ctypes.CDLL(str(LIBRARY)).edgeshard_kernel_set
    except (OSError, AttributeError):  # not built, of another machine, or older than the function
        return ""
    told.restype = ctypes.c_char_p
    name: bytes = told()
    return name.decode()
