"""How many descriptors this process may have, and how many of them connections from outside may take."""

from __future__ import annotations

MOST_DESCRIPTORS = 65_536
"""As many as the units of systemd allow."""
RESERVE = 256
"""For files, pipes and what this process dials itself: nobody from outside can take the last ones."""
LEAST = 16
"""Connections that a listener takes however few descriptors there are."""


def raise_descriptor_limit() -> int:
    """Raise this process's own limit of descriptors to what the system lets it have, and return the limit. Its
    children inherit it. Many systems begin with 1,024, which is fewer than one host can open connections."""
    import resource  # not where edgectl alone runs on a system without it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connection_cap(descriptors: int, part: float, most: int) -> int:
    """How many connections a listener may have open: `part` of the limit less the reserve, `most` at most."""
    return max(LEAST, min(most, int(max(0, descriptors - RESERVE) * part)))
