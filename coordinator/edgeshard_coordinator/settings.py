"""What can be set on a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from edgeshard.process.config import DaemonSettings


class CoordinatorSettings(DaemonSettings):
    """The `[coordinator]` section, `EDGESHARD__COORDINATOR__*`, and the command line's options."""

    section: ClassVar[str] = "coordinator"
    quotas: Path | None = Field(default=None, description="TOML file: what clients and operators may use, by identity")
