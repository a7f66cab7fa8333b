"""The native library and what it was made of: one of other sources is not called. `hatch_build.py`
runs this, too."""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

LIBRARY = Path(__file__).with_name("libedgeshard_ops.so")
SOURCES = Path(__file__).with_name("kernels")
BF16_SWITCH = "EDGESHARD_BF16_PRODUCTS"
"""Environment variable: 0 leaves out the kernels that multiply bfloat16 by AVX512-BF16, whose bits
are their own."""
_BF16_KERNELS = "avx512bf16"


def digest() -> str:
    """SHA-256 of the kernels' sources, their names included."""
    hasher = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()


def kernel_set() -> str:
    """By what the library beside this file was made: compiler, version, options that decide about
    bits; "" without."""
    try:
        function = ctypes.CDLL(str(LIBRARY)).edgeshard_kernel_set
    except (OSError, AttributeError):  # not built, of another machine, or older than the function
        return ""
    function.restype = ctypes.c_char_p
    name: bytes = function()
    return name.decode()


def kernel_names(library: ctypes.CDLL) -> tuple[str, ...]:
    """The kernels in a library that this CPU can run, the best first, by their index."""
    library.edgeshard_kernels.restype = ctypes.c_char_p
    names: list[str] = []
    while (name := library.edgeshard_kernels(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def is_allowed(name: str) -> bool:
    """False for the kernels of AVX512-BF16 if the environment leaves them out."""
    return name != _BF16_KERNELS or os.environ.get(BF16_SWITCH) != "0"


def has_bf16_products() -> bool:
    """Whether the kernels of AVX512-BF16 will run in this process."""
    try:
        names = kernel_names(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError):
        return False
    return bool(names) and names[0] == _BF16_KERNELS and is_allowed(names[0])
