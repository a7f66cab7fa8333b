"""Cores kept awake between the steps of a generation.

A node waits for the others for most of a token, too short to sleep: a core that halts meanwhile comes back with its
clock down and its caches gone, and on a virtual machine it was given to somebody else.
"""

from __future__ import annotations

from edgeshard_agent.ops import native

_NANOSECONDS = 1_000_000_000


def idle_spin(seconds: float, cores: int) -> None:
    """Keep so many cores from halting for so long from now on.

    Threads of the system's idle priority spin there, and give way to everything else at once. Without the native
    library, or on a system that is not Linux, nothing happens.
    """
    library = native.active()
    if library is not None:
        library.edgeshard_idle_spin(cores, int(seconds * _NANOSECONDS))
