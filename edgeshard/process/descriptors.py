"""The limit of this process's file descriptors, and the share of them for connections from
outside."""

from __future__ import annotations

MOST_DESCRIPTORS = 65_536
"""The limit in the units of systemd."""
RESERVE = 256
"""Descriptors for files, pipes and calls of this process: connections from outside cannot take the
last ones."""
LEAST = 16
"""Connections that a listener accepts even if there are fewer descriptors."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors to the system's hard limit, at most
    MOST_DESCRIPTORS, and return it.

    Children inherit the limit. Many systems begin with 1,024, and one host can open more
    connections than that.
    """
    import resource  # missing if only edgectl runs, on a system without it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def connection_cap(descriptors: int, part: float, most: int) -> int:
    """The connections that a listener may have open: `part` (0 to 1) of the limit less RESERVE, at
    most `most`."""
    return max(LEAST, min(most, int(max(0, descriptors - RESERVE) * part)))
