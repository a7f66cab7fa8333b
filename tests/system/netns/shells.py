"""Machines of a network as a person uses them: each with a home of its own and a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

COMMAND_S = 120.0
_PROGRAMS = {
    "edgectl": "edgeshard.cli.main",
    "edgeshard-agent": "edgeshard_agent",
    "edgeshard-coordinator": "edgeshard_coordinator",
}


@dataclass
class Machine:
    """A namespace with a home of its own. Commands are run by a shell, as they stand on the
    page."""

    network: Any
    name: str
    home: Path
    programs: Path

    @property
    def address(self) -> str:
        """Its IP address."""
        return str(self.network.address(self.name))

    def environment(self) -> dict[str, str]:
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("EDGESHARD", "XDG_"))
        }
        return clean | {"HOME": str(self.home), "PATH": f"{self.programs}:{clean['PATH']}"}

    def run(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.network.enter(self.name, "bash", "-c", command),
            cwd=self.home,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finished(self, command: str) -> str:
        """The output of a command that must succeed."""
        process = self.run(command)
        output, _ = process.communicate(timeout=COMMAND_S)
        assert process.returncode == 0, f"{self.name}$ {command}\n{output}"
        return output


@contextmanager
def made_machines(
    namespaces: ModuleType, names: Sequence[str], rate: str | None, directory: Path
) -> Iterator[dict[str, Machine]]:
    """Machines of these names, on links of `rate` as in `Network`, with EdgeShard on the path and
    an empty home."""
    programs = directory / "bin"
    programs.mkdir()
    for name, module in _PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    with namespaces.Network(names, rate) as network:
        made = {}
        for name in names:
            (directory / name).mkdir()
            made[name] = Machine(network, name, directory / name, programs)
        yield made


def end(running: Sequence[subprocess.Popen[str]]) -> None:
    """End processes, the newest first, and wait for them."""
    for process in reversed(running):
        if process.poll() is None:
            process.terminate()
    for process in running:
        process.communicate(timeout=30)
