"""A real site on loopback, shared by the tests of a module: one coordinator and three agents as processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.cli.local import LocalCluster
from edgeshard.deployment import Deployment, DeploymentSpec, parse_spec

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
LAYERS = "a=0:4,b=4:9,c=9:12"
SOON_S = 30.0
"""A quiet machine needs a second; the rest is for one whose cores others use as well. What leaks would never go."""


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
        """KV bytes in use by box, as the boxes themselves say."""
        return {node.name: sum(stage.kv_bytes_in_use for stage in node.stages) for node in await self.client.nodes()}

    async def kv_gone(self) -> None:
        """Wait until every box has said, since now, that it holds no KV; a leak would stay for ever."""
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


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., DeploymentSpec]:
    """The demo deployment with some fields changed; None takes a field out."""
    return spec


def spec(**changes: object) -> DeploymentSpec:
    values: dict[str, object] = {
        "name": "tales",
        "model": "fairy-tales",
        "source": "a",
        "dtype": "float32",
        "concurrency": 4,
        "layers": LAYERS,
    }
    return parse_spec({key: value for key, value in {**values, **changes}.items() if value is not None})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A running site with the demo model in its store and nothing deployed."""
    directory = tmp_path_factory.mktemp("site")
    async with LocalCluster(directory) as cluster, Client(cluster.address) as client:
        await client.add_model(DEMO_MODEL, "fairy-tales")
        yield Site(cluster, client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tales(site: Site) -> AsyncIterator[Deployment]:
    """The demo model over three boxes."""
    yield await site.client.deploy(spec())
    await site.client.delete_deployment("tales")
