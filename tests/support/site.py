"""A real site for tests: a coordinator and agents as processes, and queries for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.local.cluster import LocalCluster

MakeSpec = Callable[..., DeploymentSpec]
"""The demo deployment with some fields changed; None takes a field out."""
SOON_S = 30.0
"""A quiet machine needs a second; the rest is for one whose cores others use as well. A leak would never end."""


@dataclass
class Site:
    cluster: LocalCluster
    client: Client

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait until an async or plain condition holds."""
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(0.01)

    async def kv_bytes(self) -> dict[str, int]:
        """KV bytes in use by node, as the nodes themselves say."""
        return {node.name: sum(stage.kv_bytes_in_use for stage in node.stages) for node in await self.client.nodes()}

    async def kv_gone(self) -> None:
        """Wait until every node has reported, from now on, that it holds no KV; a leak would stay for ever."""
        clock = asyncio.get_running_loop().time
        began = clock()

        async def gone() -> bool:
            waited_s, nodes = clock() - began, await self.client.nodes()
            heard = all(node.heartbeat_age_s < waited_s for node in nodes)
            return heard and not any(stage.kv_bytes_in_use for node in nodes for stage in node.stages)

        await self.until(gone, SOON_S)

    async def state(self) -> tuple[object, object, object]:
        """Everything an operator sees, less what moves by itself."""
        nodes = [(n.name, n.node_id, n.connected, n.free_bytes) for n in await self.client.nodes()]
        deployments = [(d.spec, d.phase, d.epoch) for d in await self.client.deployments()]
        return nodes, deployments, [m.name for m in await self.client.stored_models()]
