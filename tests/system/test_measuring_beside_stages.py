"""A node that serves is measured: requests stop the measurement and get the same tokens, and it
ends with its mark."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.nodes.profile import Effort
from edgeshard.domain.requests.generation import Token
from tests.support.measuring_workers import measuring_worker, measuring_workers, until_stopped
from tests.support.site import Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = parse_spec(
    {
        "name": "tales",
        "model": "fairy-tales",
        "source": "a",
        "dtype": "float32",
        "concurrency": 2,
        "layers": "a=0:12",
    }
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """The client of a site whose only node serves and was never measured."""
    directory = tmp_path_factory.mktemp("beside")
    async with Site(directory, ("a",), models={"fairy-tales": DEMO_MODEL}) as site:
        await site.client.deploy(SPEC)
        yield site.client


async def tokens(client: Client, worker: psutil.Process | None = None) -> list[int]:
    """The answer's. At each of them this process, if any, is stopped: the steps came before."""
    found = []
    async for event in client.generate(
        "tales", "Once upon a time", max_new_tokens=24, ignore_eos=True
    ):
        if worker is not None:
            await until_stopped(worker)
        found += [event.token] if isinstance(event, Token) else []
    return found


async def test_requests_stop_it_and_it_ends_with_the_mark(client: Client) -> None:
    undisturbed = await tokens(client)
    seen = []

    async def profile() -> None:
        async for progress in client.profile(
            "fairy-tales", dtype=SPEC.dtype, quick=True, again=True
        ):
            seen.append(progress)

    measuring = asyncio.create_task(profile())
    worker = await measuring_worker()
    for _ in range(2):
        await until_stopped(worker, stopped=False)
        assert await tokens(client, worker) == undisturbed
        assert worker.status() == psutil.STATUS_STOPPED, (
            "it goes on when no request has run for a while"
        )
    await asyncio.wait_for(measuring, 300)
    assert seen[-1].finished and seen[-1].failure is None
    assert "waits while requests run" in {progress.what for progress in seen}
    details = await client.node_details("a")
    (stored,) = details.profiles
    assert (stored.profile.beside_stages, stored.profile.effort) == (True, Effort.QUICK)
    assert details.node.profiles_beside_stages == 1
    assert details.node.stages and not measuring_workers()
    placement = await client.plan(SPEC)
    assert placement.stages
