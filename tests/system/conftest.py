"""A real site on loopback, shared by the tests of a module: one coordinator and three agents as
processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec, parse_spec
from tests.support.site import MakeSpec, Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
LAYERS = "a=0:4,b=4:9,c=9:12"


@pytest.fixture(scope="module", autouse=True)
def forked(forked_daemons: None) -> None:
    """Every site here."""


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
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
    return parse_spec(
        {key: value for key, value in {**values, **changes}.items() if value is not None}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A running site with the demo model in its store and nothing deployed."""
    directory = tmp_path_factory.mktemp("site")
    async with Site(directory, models={"fairy-tales": DEMO_MODEL}) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tales(site: Site) -> AsyncIterator[Deployment]:
    """The demo model over three nodes."""
    yield await site.client.deploy(spec())
    await site.client.delete_deployment("tales")
