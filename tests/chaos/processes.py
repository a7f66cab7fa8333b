"""The daemons of a site as children of a nursery: started at once, ended by their pid, and their end is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY_POLL_S = 0.005
ROOT = Path(__file__).resolve().parents[2]
PATHS = (ROOT, ROOT / "agent", ROOT / "coordinator")


class Nursery:
    """The process that forks daemons; see tests/chaos/nursery.py."""

    def __init__(self) -> None:
        self.native = False
        """Whether agents run in the native kernels."""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._started: asyncio.Queue[int] = asyncio.Queue()
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGESHARD__")}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.chaos.nursery",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, process_group=0,
        )  # fmt: skip
        self.native = bool((await self._line())["native"])
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """All that it has forked end with it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()

    async def fork(self, role: str, arguments: Sequence[str], log: Path, directory: Path) -> int:
        """The new daemon's pid."""
        assert self._process is not None and self._process.stdin is not None
        request = {"role": role, "arguments": list(arguments), "log": str(log), "directory": str(directory)}
        async with self._turn:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return await self._started.get()

    def ended(self, pid: int) -> asyncio.Future[int]:
        """Has the exit code, or the negative number of the signal, once the process ended."""
        return self._ended[pid]

    async def _line(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks daemons has ended; what it said is above")
        return dict(json.loads(line))

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._line()
            if "started" in message:
                self._ended[message["started"]] = loop.create_future()
                self._started.put_nowait(message["started"])
            else:
                self._ended[message["ended"]].set_result(message["status"])


class Daemon:
    """A daemon that can be started again, with the same arguments."""

    def __init__(self, name: str, role: str, arguments: Sequence[str], directory: Path, nursery: Nursery) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._role = role
        self._directory = directory
        self._ready = directory / f"{name}.ready"
        self._arguments = [*arguments, "--ready-file", str(self._ready)]
        self._nursery = nursery
        self._pid = 0
        self._ended: asyncio.Future[int] | None = None

    @property
    def alive(self) -> bool:
        return self._ended is not None and not self._ended.done()

    @property
    def pid(self) -> int:
        return self._pid

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        self._pid = await self._nursery.fork(self._role, self._arguments, self.log, self._directory)
        self._ended = self._nursery.ended(self._pid)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """An agent is ready once layers can be placed on it, a coordinator once it serves."""
        assert self._ended is not None
        async with asyncio.timeout(timeout_s):
            while not self._ready.exists():
                if self._ended.done():
                    raise RuntimeError(
                        f"{self.name} ended with {self._ended.result()}; its log ends with:\n{self.tail()}"
                    )
                await asyncio.sleep(READY_POLL_S)

    async def wait_ended(self) -> int:
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    def signal(self, number: signal.Signals) -> None:
        """Nothing when it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._ended is not None:
            await self.wait_ended()

    async def stop(self, grace_s: float = 4.0) -> None:
        if not self.alive:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait_ended(), grace_s)
        except TimeoutError:
            await self.kill()

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])
