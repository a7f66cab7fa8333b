"""How a command reaches the coordinator, and how its coroutine is run and interrupted."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from edgeshard.domain.errors import INTERRUPTED

if TYPE_CHECKING:
    from edgeshard.client import Client, SyncClient
    from edgeshard.rpc.tls import TlsFiles

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Connect:
    """The global options: the coordinator's address, and the PEM files for mutual TLS. None if it
    is not given."""

    coordinator: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plaintext: bool | None = None

    def client(self) -> Client:
        """A client, not yet connected. Raises InvalidArgumentError naming a TLS option that is
        missing."""
        from edgeshard.client import Client

        return Client(self.coordinator, self._tls(), plaintext=self.plaintext)

    def sync_client(self) -> SyncClient:
        """As `client`, for a command that waits for a person more than for the site."""
        from edgeshard.client import SyncClient

        return SyncClient(self.coordinator, self._tls(), plaintext=self.plaintext)

    def _tls(self) -> TlsFiles | None:
        from edgeshard.rpc.tls import tls_from_options

        return tls_from_options(self.tls_ca, self.tls_cert, self.tls_key)


def connect_of(context: typer.Context) -> Connect:
    """The global options of this invocation."""
    connect = context.obj
    assert isinstance(connect, Connect)
    return connect


def ask(
    context: typer.Context, call: Callable[[Client], Awaitable[Result]], *, endless: bool = False
) -> Result:
    """Run one call of a client, and close the client after it; interrupted as `run` is."""

    async def work() -> Result:
        async with connect_of(context).client() as client:
            return await call(client)

    return run(work(), endless=endless)


def run(work: Coroutine[Any, Any, Result], *, endless: bool = False) -> Result:
    """Run a command's coroutine. Ctrl-C, SIGTERM or SIGHUP cancels it, lets it clean up, and exits
    128 + signal.

    Ctrl-C exits 0 if the work is `endless`: then it is how a user ends the command.
    """
    import asyncio  # a quarter of the time that `--help` takes

    received: list[signal.Signals] = []

    async def main() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            # Once: a second signal (a supervisor signals the process and its group) must not
            # interrupt the clean-up.
            if not received:
                received.append(number)
                task.cancel()

        # SIGINT is asyncio's own: it cancels this task and ends in KeyboardInterrupt.
        for number in (signal.SIGTERM, signal.SIGHUP):
            # A signal that is ignored stays so: `nohup` is for a command that continues without its
            # terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)
        return await work

    # A second interrupt exits before the watchers of child processes have reported; it needs no
    # message.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        raise typer.Exit(0 if endless else INTERRUPTED) from None
    except asyncio.CancelledError:
        if not received:
            raise
        raise typer.Exit(128 + received[0]) from None
