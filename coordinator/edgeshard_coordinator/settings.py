"""What can be set on a coordinator."""

from __future__ import annotations

from typing import ClassVar

from edgeshard.process.config import DaemonSettings


class CoordinatorSettings(DaemonSettings):
    """The `[coordinator]` section, `EDGESHARD__COORDINATOR__*`, and the command line's options."""

    section: ClassVar[str] = "coordinator"
