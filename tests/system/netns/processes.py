"""The real processes of a site, each inside the namespace of its node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgeshard.rpc.tls import TlsFiles
from tests.support.nursery import Forked, shared

_STOP_GRACE_S = 4.0
_POLL_S = 0.02


Process = subprocess.Popen[bytes] | Forked


class Entrance(Protocol):
    """The part of a network that runs a command on one of its hosts."""

    def enter(self, host: str, *command: str) -> list[str]: ...

    def namespace(self, host: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process and its output."""

    exit_code: int
    stdout: str
    stderr: str


class Running:
    """One process on a host. Its output is written to files in `directory`, so that it can never
    block on a full pipe.
    """

    def __init__(self, start: Callable[..., Process], directory: Path, label: str) -> None:
        self.label = label
        self._paths = (directory / f"{label}.out", directory / f"{label}.err")
        # The operator's own settings must not change a site under test.
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("EDGESHARD__")
        }
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self._process = start(
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=directory, env=environment
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> Ended:
        """Wait for its own end; if it does not end in time, raise AssertionError with its
        output."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.label} still runs after {timeout_s:g} s:\n{self.said()}"
            ) from None
        return Ended(code, *(path.read_text(errors="replace") for path in self._paths))

    def wait_for(self, condition: Callable[[str], bool], timeout_s: float) -> None:
        """Wait until its output on stderr fulfils a condition; raise AssertionError if it does not
        in time."""
        wait_until(
            lambda: condition(self._paths[1].read_text(errors="replace")), timeout_s, self.said
        )

    def said(self) -> str:
        """The end of its output, for a failure's message."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self._paths)

    def stop(self) -> None:
        """End it, politely first; nothing when it has ended."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_GRACE_S)
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()


class Launcher:
    """Starts processes on the hosts of a network and, in the end, stops every one that it
    started."""

    def __init__(self, network: Entrance, directory: Path) -> None:
        self._network = network
        self._directory = directory
        self._started: list[Running] = []

    def start(self, host: str, *arguments: str) -> Running:
        """Start `python ARGUMENTS` on a host; a module is forked (tests/support/nursery.py)."""
        label = f"{len(self._started):02}-{host}"

        def start(**options: Any) -> Process:
            if arguments[0] == "-m":
                return shared().popen(
                    arguments[1], arguments[2:], namespace=self._network.namespace(host), **options
                )
            command = self._network.enter(host, sys.executable, *arguments)
            return subprocess.Popen(command, process_group=0, **options)

        running = Running(start, self._directory, label)
        self._started.append(running)
        return running

    def daemon(
        self, host: str, module: str, tls: TlsFiles | None, *arguments: str
    ) -> tuple[Running, Path]:
        """Start a daemon with its own state directory; also the path of its ready file."""
        place = self._directory / f"{len(self._started):02}-{module}"
        ready = place / "ready.json"
        place.mkdir()
        options = ("--state-dir", str(place / "state"), "--ready-file", str(ready))
        return self.start(host, "-m", module, *options, *tls_options(tls), *arguments), ready

    def edgectl(
        self, host: str, coordinator: str, tls: TlsFiles | None, *arguments: str
    ) -> Running:
        """Start an edgectl command on a host."""
        options = ("--coordinator", coordinator, *tls_options(tls))
        return self.start(host, "-m", "edgeshard.cli.main", *options, *arguments)

    def stop(self) -> None:
        for running in self._started:
            running.terminate()
        for running in reversed(self._started):
            running.stop()


def address_when_ready(running: Running, ready: Path, timeout_s: float) -> str:
    """The address in a daemon's ready file, once it is there; raises AssertionError when the daemon
    ends first."""

    def is_ready() -> bool:
        assert running.exit_code is None or ready.exists(), (
            f"{running.label} ended early:\n{running.said()}"
        )
        return ready.exists()

    wait_until(is_ready, timeout_s, running.said)
    return str(json.loads(ready.read_text())["address"])


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
    """Poll until the condition holds; raises AssertionError with an explanation when it does not in
    time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s:\n{explain()}")
        time.sleep(_POLL_S)


def tls_options(tls: TlsFiles | None) -> tuple[str, ...]:
    if tls is None:
        return ()
    return ("--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
