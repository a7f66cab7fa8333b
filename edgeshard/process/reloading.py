"""SIGHUP: a running daemon reads its settings again, and takes up those that need no restart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Generic

import structlog

from edgeshard.domain.errors import EdgeShardError
from edgeshard.process.config import SettingsT
from edgeshard.process.logs import set_level

log = structlog.get_logger()


def changes(old: SettingsT, new: SettingsT) -> tuple[SettingsT, tuple[str, ...], tuple[str, ...]]:
    """`old` with the settings of `new` that can be applied now; their names, and the names of
    settings that need a restart."""
    changed = [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]
    updates = {name: getattr(new, name) for name in changed if name in old.reloaded}
    return (
        old.model_copy(update=updates),
        tuple(updates),
        tuple(name for name in changed if name not in updates),
    )


class Reloading(Generic[SettingsT]):
    """Reads settings again at each `reload`.

    `read` returns the newest settings. `prepare` checks all that they name, such as a file of
    quotas, and returns a function that applies them and cannot fail: either all new values are
    applied, or none.
    """

    def __init__(
        self,
        settings: SettingsT,
        read: Callable[[], SettingsT],
        prepare: Callable[[SettingsT], Callable[[], None]],
    ) -> None:
        self.settings = settings
        self._read = read
        self._prepare = prepare

    def reload(self) -> None:
        """Log what was taken up and what needs a restart, or why nothing was taken up."""
        try:
            settings, applied_names, waiting = changes(self.settings, self._read())
            take_up = self._prepare(settings)
        except EdgeShardError as error:
            log.error("settings_not_reloaded", error=error.message, field=error.field)
            return
        set_level(settings.log_level)
        take_up()
        self.settings = settings
        log.warning("settings_reloaded", changed=list(applied_names), need_a_restart=list(waiting))

    def on_hangup(self, stop: Callable[[], object]) -> None:
        """From now on SIGHUP reloads. If SIGHUP means that the process's own terminal is gone, it
        stops the process, as it does with any other."""
        had_terminal = sys.stderr.isatty()

        def hung_up() -> None:
            if had_terminal and not os.isatty(sys.stderr.fileno()):
                stop()
            else:
                self.reload()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
