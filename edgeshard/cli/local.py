"""A whole site on this machine: a coordinator and several agents as processes on loopback, for demo, tests and lab."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from edgeshard.domain.errors import (
    DeadlineError,
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.identity import Principal, Role, coordinator_of

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.identity.authority import Authority
    from edgeshard.rpc.tls import TlsFiles

SITE = "here"
"""The name of a site that this machine made for itself."""
_ERROR_BY_EXIT_CODE: dict[int, type[EdgeShardError]] = {
    2: InvalidArgumentError,
    3: NotFoundError,
    4: DeniedError,
    5: UnavailableError,
    6: DeadlineError,
}
_READY_POLL_S = 0.02
_STOP_GRACE_S = 4.0
_TAIL_LINES = 12


def own_address(address: str) -> str:
    """How this machine dials what listens at `address`."""
    from edgeshard.rpc.tls import join_address, split_address

    host, port = split_address(address)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _any_port(address: str) -> str:
    from edgeshard.rpc.tls import join_address, split_address

    return join_address(split_address(address)[0], 0)


def _private_log(path: Path) -> BinaryIO:
    from edgeshard.process.private import open_private

    return open(path, "ab", opener=open_private)


class Daemon:
    """One child process with a ready file and a log file in `directory`.

    It listens where `listen` says, by option, such as `{"--listen": "127.0.0.1:0"}`. One `in_view` logs to the stderr
    of this process instead. The operator's own settings for daemons count where it is `configured`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        directory: Path,
        *,
        listen: Mapping[str, str] | None = None,
        in_view: bool = False,
        configured: bool = False,
    ) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self.address = ""
        self.gateway = ""
        """The URL of its HTTP gateway, where it has one."""
        self._ready_path = directory / f"{name}.ready"
        self._command = [sys.executable, "-m", module, *arguments, "--ready-file", str(self._ready_path)]
        self._listen = dict(listen or {})
        self._directory = directory
        self._in_view = in_view
        self._configured = configured
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process; see `wait_ready` for when it listens."""
        self._ready_path.unlink(missing_ok=True)
        self.address = ""
        environment = dict(os.environ)
        if not self._configured:
            # The operator's own settings for daemons must not change a temporary site.
            environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGESHARD__")}
        listen = [word for option in self._listen.items() for word in option]
        with contextlib.nullcontext() if self._in_view else _private_log(self.log_path) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *listen,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=None if self._configured else self._directory,  # such settings may name files
                env=environment,
                # A Ctrl-C in the terminal is for the command, which then stops its children in order.
                process_group=0,
            )

    async def start_anywhere(self, timeout_s: float) -> str:
        """Start it, and again with any free ports where one that it was to have is taken; its address once it listens.

        The port is its own from the first try on: nobody looks beforehand whether it is free. Raises as `wait_ready`.
        """
        await self.start()
        try:
            return await self.wait_ready(timeout_s)
        except UnavailableError:
            anywhere = {option: _any_port(address) for option, address in self._listen.items()}
            if anywhere == self._listen:
                raise
            self._listen = anywhere
        await self.start()
        return await self.wait_ready(timeout_s)

    def keep_address(self) -> None:
        """Listen here again at the next start, so that who knows the address comes back."""
        self._listen["--listen"] = self.address

    async def wait_ready(self, timeout_s: float) -> str:
        """Its address once it listens. Raises the typed error behind an early exit, DeadlineError after `timeout_s`."""
        if not await self.ready(timeout_s):
            raise self._early_exit(await self.exited())
        return self.address

    async def ready(self, timeout_s: float) -> bool:
        """Whether it listens, once it does; False when it ended instead. Raises DeadlineError after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        exited = asyncio.ensure_future(self.exited())
        try:
            while not self._ready_path.exists():
                if exited.done():
                    return False
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"{self.name} was not ready within {timeout_s:g} s; its log ends with:\n{self.log_tail()}"
                    )
                await asyncio.wait({exited}, timeout=_READY_POLL_S)
        finally:
            exited.cancel()
        ready = json.loads(self._ready_path.read_text())
        self.address, self.gateway = str(ready["address"]), str(ready.get("gateway", ""))
        return True

    async def exited(self) -> int:
        """Its exit code, once it ends."""
        assert self._process is not None
        return await self._process.wait()

    async def ended(self, timeout_s: float) -> int:
        """Its exit code, once it ends by itself. Raises TimeoutError after `timeout_s`."""
        return await asyncio.wait_for(self.exited(), timeout_s)

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """End it with SIGTERM, after `grace_s` with SIGKILL."""
        if self.pid is None or self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it with SIGKILL, as a power cut would."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process; nothing when it has ended."""
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def log_tail(self) -> str:
        """The last lines of its log."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def _early_exit(self, exit_code: int) -> EdgeShardError:
        tail = self.log_tail()
        for line in reversed(tail.splitlines()):
            if "needs the" in line and "extra: pip install" in line:
                return FailedPreconditionError(line.strip(), reason="MISSING_EXTRA")
            if line.startswith("error: "):
                kind = _ERROR_BY_EXIT_CODE.get(exit_code, FailedPreconditionError)
                return kind(f"{self.name} did not start: {line.removeprefix('error: ')}")
        return FailedPreconditionError(
            f"{self.name} ended with exit code {exit_code} before it was ready; its log ends with:\n{tail}"
        )


class LocalCluster:
    """A coordinator and one agent for each name, on free loopback ports, with all their files under `directory`.

    As an async context manager it starts everything and stops everything, also on an error or an interrupt.
    The coordinator listens at `listen`, and where `coordinator_listen` says, by option; an agent where
    `listen_by_agent` does. With `elsewhere` a process takes other ports where these are taken, and the operator's
    own settings for daemons count where it is `configured`. `agent_arguments` are added to every agent's command line,
    `arguments_by_agent` to one's; `coordinator_arguments` to the coordinator's. `startup_timeout_s` bounds each wait
    for a ready file. A
    `secure` one has an authority of its own, in memory unless it is given; the others speak in plaintext. With
    `share_store` the agents read the coordinator's models in place.
    """

    def __init__(  # noqa: PLR0913 - what a site may be made of
        self,
        directory: Path,
        nodes: Sequence[str] = ("a", "b", "c"),
        *,
        agent_arguments: Sequence[str] = (),
        arguments_by_agent: Mapping[str, Sequence[str]] | None = None,
        coordinator_arguments: Sequence[str] = (),
        listen: str = "127.0.0.1:0",
        coordinator_listen: Mapping[str, str] | None = None,
        listen_by_agent: Mapping[str, str] | None = None,
        elsewhere: bool = False,
        configured: bool = False,
        threads: int = 1,
        startup_timeout_s: float = 60.0,
        secure: bool = False,
        authority: Authority | None = None,
        share_store: bool = False,
    ) -> None:
        self.directory = directory
        self.nodes = tuple(nodes)
        self.agents: dict[str, Daemon] = {}
        self._authority = authority or (_authority() if secure else None)
        self.coordinator = Daemon(
            "coordinator",
            "edgeshard_coordinator",
            [
                *("--state-dir", str(directory / "coordinator")),
                *self._identity(coordinator_of(SITE)),
                *coordinator_arguments,
            ],
            directory,
            listen={"--listen": listen, **(coordinator_listen or {})},
            configured=configured,
        )
        self._listen = listen
        self._listen_by_agent = dict(listen_by_agent or {})
        self._elsewhere = elsewhere
        self._configured = configured
        self._share_store = share_store
        self._agent_arguments = tuple(agent_arguments)
        self._arguments_by_agent = dict(arguments_by_agent or {})
        self._threads = threads
        self._startup_timeout_s = startup_timeout_s

    @property
    def address(self) -> str:
        """The coordinator's host:port, once it has started."""
        return self.coordinator.address

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the coordinator, then all agents at once. Raises the typed error of the first that fails."""
        await self.start_coordinator()
        await self.start_agents()

    async def start_coordinator(self) -> str:
        """Start the coordinator alone and return its address."""
        return await self._started(self.coordinator)

    async def start_agents(self) -> None:
        """Start every agent and wait until layers can be placed on all."""
        waits = [asyncio.ensure_future(self.start_agent(name)) for name in self.nodes]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def start_agent(self, name: str) -> str:
        """Start one agent, also one that was stopped or killed; its address, once layers can be placed on it."""
        return await self._started(self._agent(name))

    async def _started(self, daemon: Daemon) -> str:
        if self._elsewhere:
            return await daemon.start_anywhere(self._startup_timeout_s)
        await daemon.start()
        return await daemon.wait_ready(self._startup_timeout_s)

    async def drop_agents(self) -> None:
        """End the agents; they find the coordinator where it is by then when they start again."""
        await asyncio.gather(*(agent.kill() for agent in self.agents.values()))
        self.agents.clear()

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Stop the agents, then the coordinator, each killed after `grace_s`; an interrupt meanwhile kills the rest."""
        try:
            await asyncio.gather(*(agent.stop(grace_s) for agent in self.agents.values()))
            await self.coordinator.stop(grace_s)
        finally:
            for daemon in (*self.agents.values(), self.coordinator):
                daemon.send_signal(signal.SIGKILL)

    def _agent(self, name: str) -> Daemon:
        if name not in self.agents:
            arguments = ["--coordinator", own_address(self.address or self._listen), "--name", name]
            arguments += ["--state-dir", str(self.directory / name), "--threads", str(self._threads)]
            arguments += self._identity(Principal(SITE, Role.AGENT, name))
            if self._share_store:
                arguments += ["--shared-store", str(self.directory / "coordinator" / "models")]
            arguments += [*self._agent_arguments, *self._arguments_by_agent.get(name, ())]
            listen = self._listen_by_agent.get(name, "127.0.0.1:0")
            self.agents[name] = Daemon(
                name,
                "edgeshard_agent",
                arguments,
                self.directory,
                listen={"--listen": listen},
                configured=self._configured,
            )
        return self.agents[name]

    def client(self) -> Client:
        """A client of the site, not yet connected, which may do everything."""
        from edgeshard.client import Client

        if self._authority is None:
            return Client(self.address, plaintext=True)
        return Client(self.address, self.operator_files())

    def operator_files(self) -> TlsFiles:
        """Of the operator of a secure site."""
        return self._files(Principal(SITE, Role.OPERATOR, "admin"))

    def _identity(self, principal: Principal) -> list[str]:
        """The options that say who a daemon is."""
        if self._authority is None:
            return ["--plaintext"]
        files = self._files(principal)
        return ["--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key)]

    def _files(self, principal: Principal) -> TlsFiles:
        from edgeshard.rpc.tls_files import issue_files

        assert self._authority is not None
        return issue_files(self._authority, principal, self.directory / "pki" / f"{principal.role}-{principal.id}")


def _authority() -> Authority:
    from edgeshard.identity.authority import Authority, now

    return Authority.create(SITE, now())
