"""A process's report of the machine that it runs on, for the site's operators. Nothing is decided from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edgeshard.domain.ids import Figure, Text


class Support(StrEnum):
    """Whether a means of quick computing is used here."""

    UNKNOWN = ""
    """Nothing computes here, or the machine has no such thing."""
    USED = "used"
    MISSING = "missing"
    """The machine could have it, but the installed software cannot use it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Memory and disk in bytes; 0 and "" if the system does not report it. Times are seconds since
    1970 on its own clock.

    The disk is the one of the state directory, on which `disk_write_bps` (bytes a second, flushed)
    was measured. `cpu_quota` is how many cores its control group may use, 0 if all. `huge_pages` is
    the system's mode: "always", "madvise" or "never". The process's own certificate ends at
    `certificate_ends_s` and is to be renewed at `certificate_due_s`. `clock_ahead_s` is by how much
    its clock was ahead of the coordinator's, measured by the coordinator.
    """

    version: Text = ""
    utc_s: Figure = 0.0
    cores: int = 0
    cpu_quota: Figure = 0.0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    swap_used_bytes: int = 0
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0
    disk_write_bps: Figure = 0.0
    huge_pages: Text = ""
    kernels: Support = Support.UNKNOWN
    cuda: Support = Support.UNKNOWN
    certificate_ends_s: Figure = 0.0
    certificate_due_s: Figure = 0.0
    clock_ahead_s: Figure = 0.0
