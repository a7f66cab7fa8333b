"""Daemons as child processes of a command: their ready files, logs, ends and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from edgeshard.domain.errors import (
    DeadlineError,
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

WINDOW_S = 60.0
MOST_STARTS = 5
"""Most starts within any `WINDOW_S`; after as many failed starts in a row there is no other."""
FIRST_PAUSE_S = 0.25


class Restarts:
    """Decides when one process starts again after it ended, and when it cannot start."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._in_vain = 0

    def started(self, now_s: float) -> None:
        """Note a start."""
        self._starts.append(now_s)

    def pause_s(self, now_s: float, exit_code: int, in_vain: bool) -> float | None:
        """Seconds from an end to the next start; None if the process cannot start.

        The pause doubles with each start of the last minute. `in_vain` means that the ended start
        had failed.
        """
        self._in_vain = self._in_vain + 1 if in_vain else 0
        # Denied, as after edgectl delete node: another try would get the same answer.
        if exit_code == DeniedError.exit_code or self._in_vain == MOST_STARTS:
            return None
        recent = [start for start in self._starts if now_s - start < WINDOW_S]
        if len(recent) == MOST_STARTS:
            return recent[0] + WINDOW_S - now_s
        return float(FIRST_PAUSE_S * 2 ** len(recent))


STOP_GRACE_S = 4.0
_ERROR_BY_EXIT_CODE: dict[int, type[EdgeShardError]] = {
    2: InvalidArgumentError,
    3: NotFoundError,
    4: DeniedError,
    5: UnavailableError,
    6: DeadlineError,
}
_READY_POLL_S = 0.02
_TAIL_LINES = 12


def _private_log(path: Path) -> BinaryIO:
    from edgeshard.process.private import open_private

    return open(path, "ab", opener=open_private)


class ChildDaemon:
    """One child process with a ready file and a log file in `directory`.

    `listen` has its addresses by option, such as `{"--listen": "127.0.0.1:0"}`. A daemon `in_view`
    logs to the stderr of this process instead. A `configured` one takes the operator's own settings
    for daemons. It ends with this process, however that ends, unless it `stays`. It keeps the file
    descriptors of `holding` open.
    """

    def __init__(  # noqa: PLR0913 - what a process may be given
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        directory: Path,
        *,
        listen: Mapping[str, str] | None = None,
        in_view: bool = False,
        configured: bool = False,
        stays: bool = False,
        holding: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self.starts = 0
        self.address = ""
        """Its host:port; empty until it listens."""
        self.gateway = ""
        """The URL of its HTTP gateway; empty without one."""
        self._enrolment = ""
        self._log_start = 0
        self._ready_path = directory / f"{name}.ready"
        # With -P: files in the user's working directory are not imported as modules.
        self._command = [
            sys.executable,
            "-P",
            "-m",
            module,
            *arguments,
            "--ready-file",
            str(self._ready_path),
        ]
        if not stays:
            self._command += ["--parent", str(os.getpid())]
        self._holding = tuple(holding)
        self._listen = dict(listen or {})
        self._directory = directory
        self._in_view = in_view
        self._configured = configured
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return (
            self._process.pid
            if self._process is not None and self._process.returncode is None
            else None
        )

    async def start(self) -> None:
        """Start the process; see `wait_ready` for when it listens."""
        self._ready_path.unlink(missing_ok=True)
        self.address = ""
        # The operator's own settings for daemons must not change a temporary site.
        environment = {
            key: text
            for key, text in os.environ.items()
            if self._configured or not key.startswith("EDGESHARD__")
        }
        listen = [word for option in self._listen.items() for word in option]
        self.starts += 1
        with contextlib.nullcontext() if self._in_view else _private_log(self.log_path) as log:
            self._log_start = 0 if log is None else log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *listen,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=None if self._configured else self._directory,  # such settings may name files
                env=environment,
                pass_fds=self._holding,
                # A Ctrl-C in the terminal is for the command, which then stops its children in
                # order.
                process_group=0,
            )

    async def start_anywhere(self, timeout_s: float) -> str:
        """Start the process, and again on any free ports if a port of `listen` is taken; returns
        its address.

        Ports are not probed beforehand: the daemon itself takes them. Raises as `wait_ready`.
        """
        from edgeshard.rpc.tls import join_address, split_address

        await self.start()
        try:
            return await self.wait_ready(timeout_s)
        except UnavailableError:
            anywhere = {
                option: join_address(split_address(at)[0], 0) for option, at in self._listen.items()
            }
            if anywhere == self._listen:
                raise
            self._listen = anywhere
        await self.start()
        return await self.wait_ready(timeout_s)

    def keep_address(self) -> None:
        """Take the last ports at the next start, too, so that peers that know the address find it
        again."""
        from edgeshard.rpc.tls import join_address, split_address

        options = dict(pairwise(self._command)) | self._listen
        last = {
            "--listen": self.address,
            "--enrol-listen": self._enrolment,
            "--http-listen": self.gateway,
        }
        for option, address in last.items():
            if address:
                at = address.rpartition("/")[2]
                self._listen[option] = join_address(
                    split_address(options.get(option, at))[0], split_address(at)[1]
                )

    async def wait_ready(self, timeout_s: float) -> str:
        """Wait until the daemon listens; returns its address.

        Raises the typed error of an early exit, DeadlineError after `timeout_s`.
        """
        if not await self.ready(timeout_s):
            raise self.error_of(await self.exited())
        return self.address

    async def ready(self, timeout_s: float) -> bool:
        """Wait until the daemon listens; False if it ended instead. Raises DeadlineError after
        `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        exited = asyncio.ensure_future(self.exited())
        try:
            while not self._ready_path.exists():
                if exited.done():
                    return False
                if time.monotonic() > deadline_s:
                    tail = self.log_tail()
                    says = (
                        f"its log ends with:\n{tail}"
                        if tail
                        else "it has logged nothing: is the machine busy?"
                    )
                    raise DeadlineError(f"{self.name} was not ready within {timeout_s:g} s; {says}")
                await asyncio.wait({exited}, timeout=_READY_POLL_S)
        finally:
            exited.cancel()
        ready = json.loads(self._ready_path.read_text())
        self.address = str(ready["address"])
        self.gateway = str(ready.get("gateway", ""))
        self._enrolment = str(ready.get("enrolment", ""))
        return True

    async def exited(self) -> int:
        """Wait for the end of the process; returns its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def ended(self, timeout_s: float) -> int:
        """As `exited`. Raises TimeoutError after `timeout_s`."""
        return await asyncio.wait_for(self.exited(), timeout_s)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the process with SIGTERM, after `grace_s` with SIGKILL."""
        if self.pid is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await self.ended(grace_s)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End the process with SIGKILL, as a power cut would."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def log_tail(self) -> str:
        """The last lines of its log since the last start."""
        text = self.log_path.read_bytes()[self._log_start :] if self.log_path.exists() else b""
        return "\n".join(text.decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def error_of(self, exit_code: int) -> EdgeShardError:
        """The typed error for an end of the process by itself, before or after it listened."""
        tail, how = self.log_tail(), ended_how(exit_code)
        if self.address:
            return FailedPreconditionError(
                f"{self.name} ended {how}; its log {self.log_path} ends with:\n{tail}",
                reason="PROCESS_ENDED",
            )
        for line in reversed(tail.splitlines()):
            if "needs the" in line and "extra: pip install" in line:
                return FailedPreconditionError(line.strip(), reason="MISSING_EXTRA")
            if line.startswith("error: "):
                kind = _ERROR_BY_EXIT_CODE.get(exit_code, FailedPreconditionError)
                return kind(f"{self.name} did not start: {line.removeprefix('error: ')}")
        return FailedPreconditionError(
            f"{self.name} ended {how} before it was ready; its log {self.log_path} ends "
            f"with:\n{tail}"
        )


def ended_how(exit_code: int) -> str:
    """The end of a process in words: `by signal 9`, `with exit code 1`."""
    return f"with exit code {exit_code}" if exit_code >= 0 else f"by signal {-exit_code}"


async def keep_running(
    daemon: ChildDaemon, say: Callable[[str], None], proven: Callable[[], bool] = lambda: True
) -> int:
    """Start a daemon again at its addresses whenever it ends; returns its exit code once it cannot
    start.

    A start has failed if the daemon ended before it listened, or while nothing is `proven`. `say`
    takes lines for people.
    """
    restarts = Restarts()
    restarts.started(time.monotonic())
    while True:
        code = await daemon.exited()
        pause_s = restarts.pause_s(
            time.monotonic(), code, in_vain=not (daemon.address and proven())
        )
        if pause_s is None:
            return code
        say(
            f"{daemon.name} ended {ended_how(code)}: it starts again"
            + (f" in {pause_s:.0f} s" if pause_s > 1 else "")
        )
        await asyncio.sleep(pause_s)
        daemon.keep_address()
        await daemon.start()
        restarts.started(time.monotonic())
        if await daemon.ready(math.inf):
            say(f"{daemon.name} runs again")
