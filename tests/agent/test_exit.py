"""The agent's process: how it ends, and its output on stderr."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timing

# An agent that knows no coordinator; `{work}` is the present work of its threads.
SCRIPT = """
import asyncio, time
from edgeshard_agent import daemon, entry
from edgeshard_agent.engine.compute_thread import ComputeThread

async def until_stopped(client, start, settings, address):
    {work}
    client.joined.set()
    client.placeable.set()
    client.run = asyncio.Event().wait
    await real(client, start, settings, address)

real, daemon._until_stopped = daemon._until_stopped, until_stopped
entry.main()
"""
IDLE = SCRIPT.format(work="pass")
# Reading weights on the compute thread, hashing in another.
BUSY = SCRIPT.format(work="work = [asyncio.create_task(ComputeThread(1).run(time.sleep, 60)), "
                          "asyncio.get_running_loop().run_in_executor(None, time.sleep, "
                          "60)]")  # fmt: skip


TRIES = 5
"""A busy machine holds some ends up, and not all of them."""


@pytest.mark.parametrize(("script", "limit_s"), [(IDLE, 0.7), (BUSY, 2.0)], ids=["idle", "busy"])
async def test_sigterm_ends_it_promptly_whatever_its_threads_do(
    tmp_path: Path, script: str, limit_s: float
) -> None:
    took: list[float] = []
    while len(took) < TRIES and not (took and took[-1] < limit_s):
        took.append(await seconds_to_end(script, tmp_path / str(len(took))))
    assert took[-1] < limit_s, took


async def seconds_to_end(script: str, directory: Path) -> float:
    ready = directory / "ready"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script,
        "--name", "a", "--state-dir", str(directory), "--ready-file", str(ready),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while not ready.exists():
                assert process.returncode is None, (await process.communicate())[1].decode()
                await asyncio.sleep(0.02)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            _, stderr = await process.communicate()
        took = time.monotonic() - began
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, stderr.decode()
    for line in stderr.decode().splitlines():
        json.loads(line)
    return took


@pytest.mark.parametrize("daemon", ["edgeshard_agent", "edgeshard_coordinator"])
@pytest.mark.parametrize("own", [None, "ERROR"])
async def test_grpcs_own_log_is_quiet_unless_the_operator_wants_it(
    daemon: str, own: str | None
) -> None:
    script = (
        f"import os, sys\nfrom {daemon}.entry import main\nassert 'grpc' not in sys.modules\n"
        "try: main()\nexcept SystemExit: print(os.environ['GRPC_VERBOSITY'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        "--help",
        env=environment | ({} if own is None else {"GRPC_VERBOSITY": own}),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        stdout, _ = await process.communicate()
    assert stdout.decode().split()[-1] == (own or "NONE")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--advertise", "nonsense"], "advertise"),
        (["--listen", "x"], "listen"),
    ],
)
async def test_an_address_that_nobody_could_dial_is_refused_in_one_line(
    tmp_path: Path, options: list[str], field: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgeshard_agent",
        "--name", "a", "--state-dir", str(tmp_path), *options,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    (line,) = stderr.decode().splitlines()
    assert process.returncode == 2 and field in line
