"""An agent that is killed is gone soon, whatever else its cores have to do: until then its sockets
look alive."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.site import Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {"name": "tales", "model": "tales", "source": "a", "layers": "a=0:12", "concurrency": 1}
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
SOON_S = 8.0


@pytest.mark.long
@pytest.mark.timing
async def test_an_agent_that_is_killed_on_a_busy_core_is_gone_soon(tmp_path: Path) -> None:
    """Threads that spun at the idle priority once kept it for half a minute."""
    core = min(os.sched_getaffinity(0))
    async with Site(tmp_path, ("a",), models={"tales": DEMO_MODEL}, first_core=core) as site:
        client = site.client
        await client.deploy(parse_spec(SPEC))
        busy = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY, str(core))
            for _ in range(4)
        ]
        try:
            await asyncio.sleep(1.0)  # all of them have begun
            await client.complete("tales", "Once upon a time", max_new_tokens=24)
            agent = site.agents["a"]
            assert agent.pid is not None
            began, place = time.monotonic(), Path(f"/proc/{agent.pid}")
            agent.send_signal(signal.SIGKILL)
            while place.exists():
                assert time.monotonic() - began < SOON_S
                await asyncio.sleep(0.02)
        finally:
            for process in busy:
                process.kill()
                await process.wait()
