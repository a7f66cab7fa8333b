"""The worker of another checkout, or of this one, for benchmarks that compare the two."""

from __future__ import annotations

import os
from pathlib import Path

from bench.lines import LineProcess


class Tree(LineProcess):
    """`script --worker` of this checkout, run with the modules and the environment of the checkout at `root`."""

    def __init__(self, root: Path, script: str) -> None:
        root = root.resolve()
        command = [str(root / ".venv/bin/python"), str(Path(script).resolve()), "--worker"]
        super().__init__(command, os.environ | {"PYTHONPATH": str(root)}, root)
