"""The daemons of a site as children of a nursery: started at once, ended by their pid, and their end is known."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.support.nursery import Forked, Nursery

READY_POLL_S = 0.005


class Daemon:
    """A daemon that can be started again, with the same arguments; `module` is what runs."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], directory: Path, nursery: Nursery) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._module = module
        self._directory = directory
        self._ready = directory / f"{name}.ready"
        self._arguments = [*arguments, "--ready-file", str(self._ready)]
        self._nursery = nursery
        self._process: Forked | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.to_thread(
                self._nursery.popen, self._module, self._arguments, stdout=log, stderr=log, cwd=self._directory
            )

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """An agent is ready once layers can be placed on it, a coordinator once it serves."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            while not self._ready.exists():
                if self._process.returncode is not None:
                    raise RuntimeError(
                        f"{self.name} ended with {self._process.returncode}; its log ends with:\n{self.tail()}"
                    )
                await asyncio.sleep(READY_POLL_S)

    async def wait_ended(self) -> int:
        assert self._process is not None
        return await self._nursery.ended(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Nothing when it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
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
