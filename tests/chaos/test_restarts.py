"""Nodes that restart again and again leave nothing in their coordinator: no entry, connection,
task, file or memory."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import psutil
import pytest

from tests.chaos.run import say
from tests.chaos.site import ChaosSite
from tests.support.forms import in_form
from tests.support.site import COORDINATOR

COUNT = "EDGESHARD_CHAOS_RESTARTS"
"""Names the environment variable with the number of restarts."""
NODES = ("a", "b", "c", "d", "e")
WARM_UP_SHARE = 0.4
"""Part of the restarts during which allocators, threads and the ring of events fill."""
MIB = 1 << 20
GROWTH_LIMIT_BYTES = 12 * MIB
"""Over the later restarts."""
SETTLED_S = 20.0


async def restart(site: ChaosSite, names: list[str]) -> None:
    """Kill these nodes at once and have them all back."""
    for name in names:
        await site.daemons[name].kill()
    await asyncio.gather(*(site.start_daemon(name) for name in names))


async def settled(site: ChaosSite) -> dict[str, int]:
    """The coordinator's counts, once each node has its one connection; streams that ended are gone
    by then."""
    counts: dict[str, int] = {}

    async def one_each() -> bool:
        counts.update(await site.census(COORDINATOR))
        return all(
            counts[what] == len(NODES)
            for what in ("nodes", "connected", "streams", "streams alive")
        )

    try:
        await site.until(one_each, SETTLED_S)
    except TimeoutError:
        raise AssertionError(f"{len(NODES)} nodes, and the coordinator holds {counts}") from None
    return counts


@pytest.mark.timeout(900)
async def test_nodes_that_restart_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, count = random.Random(5), int(os.environ.get(COUNT, in_form(15, 30)))
    async with ChaosSite(tmp_path, NODES) as site:
        ids = {node.name: node.node_id for node in await site.client.nodes()}
        coordinator = psutil.Process(site.daemons[COORDINATOR].pid)
        done = 0
        samples = []
        for until in (int(count * WARM_UP_SHARE), count):
            while done < until:
                # One, a minority, or most of them at once.
                names = chance.sample(NODES, min(chance.choice((1, 2, 4, 5)), until - done))
                await restart(site, names)
                done += len(names)
            counts = await settled(site)
            samples.append(
                (
                    coordinator.memory_info().rss,
                    coordinator.num_fds(),
                    coordinator.num_threads(),
                    counts,
                )
            )
        assert {node.name: node.node_id for node in await site.client.nodes()} == ids
    (rss, files, threads, before), (rss_after, files_after, threads_after, after) = samples
    with capsys.disabled():
        say(
            f"\n{done} restarts: {(rss_after - rss) / MIB:+.1f} MiB, {files} and then "
            f"{files_after} files"
        )
    assert rss_after - rss <= GROWTH_LIMIT_BYTES
    assert (
        files_after <= files + 3
        and threads_after <= threads + 3
        and after["tasks"] <= before["tasks"] + 3
    )
    same = ("attachments", "attachments alive", "requests alive", "waiting for the state", "jobs")
    assert [after[what] for what in same] == [0] * len(same)
