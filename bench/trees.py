"""The worker of another checkout, or of this one, for benchmarks that compare the two."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Tree:
    """`script --worker` of this checkout, run with the modules and the environment of the checkout at `root`.

    It answers a line of JSON with a line of JSON, for as long as the `with` lasts.
    """

    def __init__(self, root: Path, script: str) -> None:
        self._root, self._script = root.resolve(), str(Path(script).resolve())
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = [str(self._root / ".venv/bin/python"), self._script, "--worker"]
        environment = os.environ | {"PYTHONPATH": str(self._root)}
        self._process = subprocess.Popen(
            command, cwd=self._root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # the worker takes its site down
            self._process.wait()

    def read(self) -> Any:
        """The worker's next line. Raises RuntimeError where it has ended."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the benchmark of {self._root} ended early")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read()
