"""Nodes that join a real site before they have imported what computes: shown, left out, and placed
on once they can."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import UnavailableError
from tests.support.site import MakeSpec, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"

AGENT = """
import asyncio, json, os, sys
from edgeshard_agent import daemon, entry

async def import_tools(client):
    # Wait until it has joined. Write down the modules that are imported by then, and import the
    # others when the test allows it.
    await client.joined.wait()
    with open(os.environ["TEST_MODULES"], "w") as file:
        json.dump(sorted(sys.modules), file)
    while not os.path.exists(os.environ["TEST_GO"]):
        await asyncio.sleep(0.01)
    return await real(client)

real, daemon._import_tools = daemon._import_tools, import_tools
if "TEST_BREAK" in os.environ:
    sys.modules["edgeshard_agent.hosting.loading"] = None
entry.main()
"""


class SlowNode:
    """An agent that joins and imports nothing more before `go`."""

    def __init__(self, site: Site, name: str, directory: Path, broken: bool = False) -> None:
        self.name = name
        self.modules, self._go = directory / "modules.json", directory / "go"
        self.log = directory / "log"
        options = [
            "--name",
            name,
            "--coordinator",
            site.cluster.address,
            "--state-dir",
            str(directory / "state"),
        ]
        environment = os.environ | {"TEST_MODULES": str(self.modules), "TEST_GO": str(self._go)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", AGENT, *options],
                stderr=log,
                env=environment | ({"TEST_BREAK": "1"} if broken else {}),
            )

    def go(self) -> None:
        self._go.touch()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small_site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A site of one node, with the demo model in its store."""
    async with Site(
        tmp_path_factory.mktemp("site"), ("a",), models={"fairy-tales": DEMO_MODEL}
    ) as site:
        yield site


async def starting(site: Site, name: str) -> bool:
    return any(
        node.name == name and node.connected and node.starting for node in await site.client.nodes()
    )


async def away(site: Site, name: str) -> bool:
    return not any(node.name == name and node.connected for node in await site.client.nodes())


async def placeable(site: Site, name: str) -> bool:
    return any(node.name == name and node.placeable for node in await site.client.nodes())


async def test_a_starting_node_is_shown_and_left_out_until_it_has_imported_what_computes(
    small_site: Site, make_spec: MakeSpec, tmp_path: Path
) -> None:
    site, by_planner = small_site, make_spec(layers=None)
    node = SlowNode(site, "b", tmp_path)
    try:
        await site.until(lambda: starting(site, "b"))
        await site.until(node.modules.exists)
        plan = await site.client.plan(by_planner)
        assert [stage.node_name for stage in plan.stages] == [
            "a"
        ] and "b, still starting" in plan.note
        with pytest.raises(UnavailableError) as refusal:
            await site.client.deploy(make_spec(layers="a=0:4,b=4:12"))
        assert refusal.value.reason == "NODE_STARTING" and refusal.value.retry_after_s
        shown = await asyncio.to_thread(
            subprocess.run,
            [
                sys.executable, "-m", "edgeshard.cli.main",
                "--coordinator", site.cluster.address, "get", "nodes",
            ],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert any(line.split()[:2] == ["b", "starting"] for line in shown.stdout.splitlines()), (
            shown
        )
        node.go()
        await site.until(lambda: placeable(site, "b"))
        deployment = await site.client.deploy(make_spec(layers="a=0:4,b=4:12"))
        assert deployment.phase is DeploymentPhase.READY
        answer = await site.client.complete("tales", "Once upon a time", max_new_tokens=4)
        assert len(answer.token_ids) == 4
        await site.client.delete_deployment("tales")
        assert not {"torch", "transformers"} & set(json.loads(node.modules.read_text()))
    finally:
        node.process.kill()
        await node.ended()


@pytest.mark.long
async def test_a_node_that_dies_while_it_starts_is_away_and_may_come_again(
    small_site: Site, tmp_path: Path
) -> None:
    site = small_site
    node = SlowNode(site, "c", tmp_path)
    await site.until(lambda: starting(site, "c"))
    node.process.kill()
    await node.ended()
    await site.until(lambda: away(site, "c"))
    again = SlowNode(site, "c", tmp_path)
    again.go()
    try:
        await site.until(lambda: placeable(site, "c"))
    finally:
        again.process.kill()
        await again.ended()


async def test_a_node_whose_import_fails_says_why_and_goes(
    small_site: Site, tmp_path: Path
) -> None:
    site = small_site
    node = SlowNode(site, "d", tmp_path, broken=True)
    await site.until(lambda: starting(site, "d"))
    node.go()
    assert await node.ended() == 1
    assert "error: what computes cannot be imported (ModuleNotFoundError" in node.log.read_text()
    await site.until(lambda: away(site, "d"))


async def test_a_device_that_is_not_there_ends_the_node_with_its_error(
    small_site: Site, tmp_path: Path
) -> None:
    site = small_site
    options = [
        "--name",
        "e",
        "--coordinator",
        site.cluster.address,
        "--state-dir",
        str(tmp_path),
        "--device",
        "cuda:77",
    ]
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "edgeshard_agent", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        ended.returncode == 2 and "error: device 'cuda:77' is not on this machine" in ended.stderr
    )
    await site.until(lambda: away(site, "e"))


async def test_a_node_that_starts_while_the_coordinator_restarts_is_placeable_after(
    small_site: Site, tmp_path: Path
) -> None:
    """The last test here: it leaves the site with another client."""
    site, address = small_site, small_site.cluster.address
    node = SlowNode(site, "f", tmp_path)
    try:
        await site.until(lambda: starting(site, "f"))
        site.cluster.coordinator.keep_address()
        await site.cluster.coordinator.kill()
        node.go()
        await site.cluster.start_coordinator()
        async with Client(address) as client:

            async def is_placeable() -> bool:
                # A coordinator that was killed may not have saved the node: it is known again once
                # it registers.
                try:
                    return any(node.name == "f" and node.placeable for node in await client.nodes())
                except UnavailableError:
                    return False

            await site.until(is_placeable)
    finally:
        node.process.kill()
        await node.ended()
