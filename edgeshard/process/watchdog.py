"""The watchdog of a daemon: it beats only if each part of the daemon did something since the last
beat.

Also a daemon's messages to systemd: it serves, it makes progress, it stops. See sd_notify(3).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from typing import Self

import structlog

from edgeshard.domain.errors import FailedPreconditionError

_OURS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Sends messages to the service manager. No call blocks; without a socket every call does
    nothing.

    `watchdog_s` is the time without a beat after which the manager ends this process; None without
    a watchdog.
    """

    def __init__(self, to: socket.socket | None = None, watchdog_s: float | None = None) -> None:
        self._socket = to
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """A notifier connected to NOTIFY_SOCKET. Removes the variables: a child must not speak for
        this process.

        Raises FailedPreconditionError if no process listens there.
        """
        variables = {name: environment.pop(name, "") for name in _OURS}
        address, microseconds = variables["NOTIFY_SOCKET"], variables["WATCHDOG_USEC"]
        if not address:
            return cls()
        for_us = variables["WATCHDOG_PID"] in ("", str(os.getpid()))
        watched = for_us and microseconds.isdecimal() and int(microseconds) > 0
        to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        to.setblocking(False)
        try:
            # A name that begins with @ is one of Linux's abstract sockets.
            to.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            to.close()
            raise FailedPreconditionError(
                f"NOTIFY_SOCKET {address}: {error.strerror or error}; unset it if no service "
                "manager started "
                "this process",
                field="NOTIFY_SOCKET",
                reason="NOTIFY_SOCKET",
            ) from None
        return cls(to, int(microseconds) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        """Tell that the daemon serves. `status` is a line for people."""
        self._send("READY=1", f"STATUS={status}")

    def beat(self) -> None:
        """Report that the daemon makes progress: the watchdog's time starts again."""
        self._send("WATCHDOG=1")

    def status(self, status: str) -> None:
        """Change the line for people."""
        self._send(f"STATUS={status}")

    def stopping(self) -> None:
        """Tell that the daemon ends."""
        self._send("STOPPING=1", "STATUS=stopping")

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            # Either the manager has gone, or its queue is full; then the next beat arrives in time.
            with contextlib.suppress(OSError):
                self._socket.send("\n".join(lines).encode())


log = structlog.get_logger()

BEATS = 3
"""Checks in the watchdog's time, so that one or two may be late on a busy machine."""


class StallDetector:
    """Compares counts of the work of each part, by the part's name, from check to check. Pure.

    A part without work must count its checks. The event loop needs no count, since it makes them.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._before = dict(counts)

    def stuck(self, counts: Mapping[str, int]) -> list[str]:
        """The parts whose counts have not changed since the last check."""
        before, self._before = self._before, dict(counts)
        return [name for name, count in counts.items() if count == before.get(name)]


async def feed_watchdog(notifier: Notifier, counts: Callable[[], Mapping[str, int]]) -> None:
    """Beat from the event loop while every count grows. Returns at once without a watchdog."""
    if notifier.watchdog_s is None:
        return
    progress, stuck = StallDetector(counts()), list[str]()
    while True:
        await asyncio.sleep(notifier.watchdog_s / BEATS)
        before, stuck = stuck, progress.stuck(counts())
        if not stuck:
            notifier.beat()
        if stuck != before:
            log.error("progress_stalled", parts=stuck) if stuck else log.info(
                "progress_resumed", parts=before
            )
            notifier.status(f"no progress: {', '.join(stuck)}" if stuck else "serving")
