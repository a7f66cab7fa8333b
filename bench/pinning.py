"""Sites whose agents are pinned to a core each from their start, as an operator pins them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from edgeshard.local.cluster import LocalCluster


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What this process starts meanwhile may run on this core only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def started(cluster: LocalCluster, cores: Sequence[int] | None) -> AsyncIterator[LocalCluster]:
    """The cluster, its agents each on one of the cores in turn; on any where `cores` is None. An agent looks at where
    it may run when it starts."""
    try:
        await cluster.start_coordinator()
        if cores is None:
            await cluster.start_agents()
        else:
            for name, core in zip(cluster.nodes, cores, strict=True):
                with on_core(core):
                    await cluster.start_agent(name)
        yield cluster
    finally:
        await cluster.stop()
