"""A process that answers questions, one JSON object a line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class LineProcess:
    """The process, which runs while the `with` lasts. `send` and `receive` apart let two of them
    work at once."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()  # it ends by itself, with all that it started
        self._process.wait()

    def send(self, question: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Its next line. Raises RuntimeError if it has ended."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        self.send(question)
        return self.receive()


class Tree(LineProcess):
    """`python -m MODULE --worker` of the checkout at `root`, with the modules and the environment
    of that."""

    def __init__(self, root: Path, module: str) -> None:
        root = root.resolve()
        command = [str(root / ".venv/bin/python"), "-m", module, "--worker"]
        super().__init__(command, os.environ | {"PYTHONPATH": str(root)}, root)
