"""A process's own part of a dump: its versions, its settings, its uptime, its threads and tasks."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from edgeshard.process.config import DaemonSettings

_SECRET_PARTS = ("key", "password", "secret", "token")


class Process:
    """This process, from the call on. `own` are EdgeShard's versions, `libraries` the distributions
    to report, too."""

    def __init__(
        self, settings: DaemonSettings, own: Mapping[str, str], libraries: Sequence[str]
    ) -> None:
        self.settings = settings
        self._own = dict(own)
        self._libraries = tuple(libraries)
        self._began_s = time.monotonic()

    def about(self) -> dict[str, Any]:
        """Describe the process in JSON types. Call it from the event loop's thread, whose tasks it
        counts."""
        return {
            "versions": self._own | versions(self._libraries),
            "settings": public_settings(self.settings),
            "process": {
                "pid": os.getpid(),
                "uptime_s": round(time.monotonic() - self._began_s, 3),
                # The same moment on the clock that events have and on the wall's.
                "monotonic_s": time.monotonic(),
                "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "peak_memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "threads": sorted(thread.name for thread in threading.enumerate()),
                "tasks": dict(Counter(_what(task) for task in asyncio.all_tasks()).most_common()),
            },
        }


def versions(libraries: Sequence[str]) -> dict[str, str]:
    """The versions of these distributions, of Python and of the system, by name."""
    version_of = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name in libraries:
        try:
            version_of[name] = version(name)
        except PackageNotFoundError:
            version_of[name] = "not installed"
    return version_of


def public_settings(settings: DaemonSettings) -> dict[str, Any]:
    """The settings as JSON types. A setting named as a key or a secret shows only whether it is
    set."""
    values = settings.model_dump(mode="json")
    return {
        name: value if value is None or not _is_secret(name) else "set"
        for name, value in values.items()
    }


def _is_secret(name: str) -> bool:
    return any(part in name for part in _SECRET_PARTS)


def _what(task: asyncio.Task[Any]) -> str:
    # Not the task's name nor what it works on: those may be a user's.
    return getattr(task.get_coro(), "__qualname__", "task")
