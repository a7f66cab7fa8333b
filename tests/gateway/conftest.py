"""A real site with a gateway, shared by the tests of a module: a coordinator, three nodes, the demo
model on them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.chat_models import DEMO_MODEL, demo_model_with
from tests.support.http import Http
from tests.support.site import Site

WITH_TOOLS = (
    "{% for m in messages %}{{ m.content }} {% for c in m.tool_calls or [] %}<tool_call>{{ "
    "c.function | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}"
)
"""A chat template that knows tools."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    tmp_path_factory: pytest.TempPathFactory, forked_daemons: None
) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    gateway = ("--http-listen", "127.0.0.1:0")
    async with Site(
        directory, models={"fairy-tales": DEMO_MODEL}, coordinator_arguments=gateway
    ) as site:
        client = site.client
        spec = {
            "name": "tales",
            "model": "fairy-tales",
            "source": "a",
            "dtype": "float32",
            "concurrency": 4,
        }
        await client.deploy(parse_spec({**spec, "layers": "a=0:4,b=4:9,c=9:12"}))
        await client.add_model(demo_model_with(directory / "handy", WITH_TOOLS), "handy")
        # Its context is so small that clients use the other's for longer requests.
        handy = {
            "name": "handy",
            "model": "handy",
            "max_context": 256,
            "layers": "a=0:4,b=4:9,c=9:12",
        }
        await client.deploy(parse_spec({**spec, **handy}))
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(site: Site) -> Http:
    """Requests with a key that may use everything."""
    _, key = await site.client.create_key("tests")
    return Http(site.cluster.coordinator.gateway, key)
