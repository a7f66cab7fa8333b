"""One of two replicas is killed amid answers: no token is lost or changed, and the other continues
at its epoch.

More: `python -m tests.chaos.replica_kills`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from tests.chaos.failpoints import Failpoint, Place
from tests.chaos.replica_kills import NODES, kills
from tests.chaos.site import ChaosSite, spec
from tests.support.site import COORDINATOR

KILLS = "EDGESHARD_CHAOS_REPLICA_KILLS"
"""Names the environment variable with the number of kills."""


@pytest.mark.long
@pytest.mark.skipif(not native_available(), reason="torch's operators do not promise the bits")
@pytest.mark.timeout(900)
async def test_a_killed_replica_costs_no_token(tmp_path: Path) -> None:
    done = await kills(tmp_path, int(os.environ.get(KILLS, "3")), seed=5)
    assert [kill for kill in done if kill.problems] == []
    assert any(kill.moved for kill in done), "no request was at a replica when it was killed"


@pytest.mark.timeout(300)
async def test_a_coordinator_that_is_killed_around_their_write_has_all_replicas_or_none(
    tmp_path: Path,
) -> None:
    async with ChaosSite(tmp_path, NODES) as site:
        for place, count in ((Place.BEFORE_SAVE, 0), (Place.AFTER_SAVE, len(NODES))):
            site.arm(COORDINATOR, [Failpoint(f"killed {place}", place, what="new->loading")])
            spec_of_all = spec(layers=None, source=None, replicas=len(NODES))
            asked = asyncio.create_task(site.client.deploy(spec_of_all, wait=False, timeout_s=20))
            await site.daemons[COORDINATOR].exited()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await site.restore()
            assert f"killed {place}" in site.marks()
            assert len(await site.client.deployments()) == count, place
