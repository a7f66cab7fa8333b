"""CRC32C of memory, without copying it."""

from __future__ import annotations

import numpy as np

from edgeshard_agent.ops import native


def crc32c(data: memoryview) -> int | None:
    """Of contiguous bytes; None without the native library. Other threads run meanwhile."""
    library = native.active()
    if library is None:
        return None
    found: int = library.edgeshard_crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data))
    return found
