"""The clients of others, which have an environment of their own, and commands as a user runs
them."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(os.environ.get("EDGESHARD_TEST_CLIENTS", ROOT / ".venv-clients"))
needs_clients = pytest.mark.skipif(
    not (CLIENTS / "bin" / "python").exists(), reason="run `make clients` first"
)

needs_node_clients = pytest.mark.skipif(
    shutil.which("node") is None or not (CLIENTS / "node" / "node_modules").exists(),
    reason="node is not installed, or `make clients` was run without npm",
)


async def run(*command: str | Path, timeout_s: float = 240.0, directory: Path | None = None) -> str:
    """The output of the command; if it fails, the test fails with it."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, said.decode()[-4000:]
    return said.decode()
