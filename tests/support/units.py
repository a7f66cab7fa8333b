"""A unit run as systemd would run it, without systemd: its command, environment, socket and
directories."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path

DEADLINE_S = 90.0
PROGRAMS = "/opt/edgeshard/bin"
"""The folder of the programs of the units under test; the modules of this checkout run instead."""


class Unit:
    """The unit `name` laid out under `root`, run in `directory`. `watchdog_s` stands for
    WatchdogSec=.

    `script` runs in place of its program.
    """

    def __init__(
        self, root: Path, name: str, directory: Path, watchdog_s: float = 4.5, script: str = ""
    ) -> None:
        self.text = (root / f"etc/systemd/system/{name}.service").read_text()
        self.log = directory / f"{name}.log"
        self._root = root
        self._name = name
        self._directory = directory
        self._watchdog_s = watchdog_s
        self._script = script
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._process: asyncio.subprocess.Process | None = None

    def values(self, key: str) -> list[str]:
        return re.findall(rf"^{key}=(.*)$", self.text, re.MULTILINE)

    async def start(self, *more: str) -> None:
        """Start it; `more` are arguments. See `said` for when it serves."""
        state = self._root / "var/lib" / self.values("StateDirectory")[0]
        state.mkdir(mode=0o700, exist_ok=True)
        credentials = self._directory / "credentials"
        shutil.rmtree(credentials, ignore_errors=True)
        credentials.mkdir()
        for name, source in (value.split(":") for value in self.values("LoadCredential")):
            shutil.copyfile(self._root / source.lstrip("/"), credentials / name)
            (credentials / name).chmod(0o400)
        given = {"STATE_DIRECTORY": str(state), "CREDENTIALS_DIRECTORY": str(credentials)}
        (line,) = self.values("ExecStart")
        command = [
            re.sub(r"\$\{(\w+)\}", lambda match: given[match[1]], word)
            for word in shlex.split(line)
        ]
        command[command.index("--config") + 1] = str(
            self._root / command[command.index("--config") + 1].lstrip("/")
        )
        module = command[0].removeprefix(f"{PROGRAMS}/").replace("-", "_")
        program = ["-c", self._script] if self._script else ["-m", module]
        address = self._directory / "notify"
        address.unlink(missing_ok=True)
        self._manager.bind(str(address))
        self._manager.setblocking(False)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("EDGESHARD__")
        }
        environment |= dict(value.split("=") for value in self.values("Environment"))
        environment |= {
            "NOTIFY_SOCKET": str(address),
            "WATCHDOG_USEC": str(round(1e6 * self._watchdog_s)),
        }
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *program, *command[1:], *more, env=environment, cwd="/", stderr=log
            )

    async def said(self) -> dict[str, str]:
        """The next message, as its variables. Fails with the log when the process has ended or is
        silent for long."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        message = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._manager, 4096))
        await asyncio.wait(
            {ended, message}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        ended.cancel()
        if not message.done():
            message.cancel()
            raise AssertionError(f"{self._name} says nothing; its log:\n{self.log.read_text()}")
        return dict(line.split("=", 1) for line in message.result().decode().splitlines())

    async def until(self, **wanted: str) -> dict[str, str]:
        """The first message that has these variables."""
        while not wanted.items() <= (said := await self.said()).items():
            pass
        return said

    def unread(self) -> list[str]:
        """The output that was not read."""
        found = []
        while True:
            try:
                found.append(self._manager.recv(4096).decode())
            except BlockingIOError:
                return found

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def stop(self) -> int:
        """As `systemctl stop` begins it; the exit code."""
        self.signal(signal.SIGTERM)
        await self.until(STOPPING="1")
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), DEADLINE_S)

    async def close(self) -> None:
        """End it whatever it does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._manager.close()
