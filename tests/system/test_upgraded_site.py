"""docs/upgrade.md on a site of real processes, with builds of the same and of another wire
version."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import edgeshard
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from tests.support.site import MakeSpec, Site

pytestmark = [pytest.mark.timing, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "edgeshard" / "demo_model"
READY_S = 90.0
LAYERS = "a=0:6,b=6:12"
Build = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def forked() -> None:
    """Start every daemon without forking: a forked one has imported the modules of this tree."""


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Makes a copy of this tree with another version and wire version."""

    def make(version: str, wire: int) -> Path:
        tree = tmp_path / f"build-{version}"
        skipped = shutil.ignore_patterns("__pycache__")
        for package in ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator"):
            shutil.copytree(ROOT / package, tree / package, ignore=skipped)
        init = tree / "edgeshard" / "__init__.py"
        text = init.read_text()
        text, versions = re.subn(r'version\("edgeshard"\)', f'"{version}"', text)
        text, wires = re.subn(
            r"^WIRE_VERSION = .*$", f"WIRE_VERSION = {wire}", text, flags=re.MULTILINE
        )
        assert (versions, wires) == (1, 1)
        init.write_text(text)
        return tree

    return make


class Upgrade(Site):
    """A site whose processes start from one tree or another."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, ("a", "b"), models={"fairy-tales": DEMO_MODEL})
        self._environment = monkeypatch

    def use(self, tree: Path) -> None:
        """Take programs from `tree` at each start from now on."""
        parts = (tree, tree / "agent", tree / "coordinator")
        self._environment.setenv("PYTHONPATH", ":".join(map(str, parts)))

    async def restart_coordinator(self) -> None:
        self.cluster.coordinator.keep_address()
        await self.cluster.coordinator.stop()
        await self.cluster.start_coordinator()

    async def restart_agents(self, *names: str) -> None:
        await asyncio.gather(*(self.cluster.agents[name].stop() for name in names))
        await asyncio.gather(*(self.cluster.start_agent(name) for name in names))

    async def tokens(self) -> tuple[int, ...]:
        """The answer to a prompt, once the deployment is ready."""
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(EdgeShardError):
                    (deployment,) = await self.client.deployments()
                    if deployment.phase is DeploymentPhase.READY:
                        return (
                            await self.client.complete(
                                "tales", "Once upon a time", max_new_tokens=16
                            )
                        ).token_ids
                await asyncio.sleep(0.2)

    async def runs(self, version: str) -> None:
        """Wait until both nodes have reported a version."""
        async with asyncio.timeout(READY_S):
            while True:
                nodes = await self.client.nodes()
                if [node.condition and node.condition.version for node in nodes] == [
                    version,
                    version,
                ]:
                    return
                await asyncio.sleep(0.2)

    async def refused(self, name: str) -> None:
        """Wait until an agent's log names both wire versions."""
        async with asyncio.timeout(READY_S):
            while "upgrade the agent" not in self.cluster.agents[name].log_path.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def test_both_kinds_of_upgrade_and_the_way_back(
    tmp_path: Path, build: Build, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = edgeshard.WIRE_VERSION
    same, other = build("9.0.0", wire), build("9.1.0", wire + 1)
    (tmp_path / "site").mkdir()
    async with Upgrade(tmp_path / "site", monkeypatch) as site:
        client = site.client
        await client.deploy(make_spec(layers=LAYERS))
        expected = await site.tokens()

        # The wire version stays: the coordinator, then one node after the other.
        site.use(same)
        await site.restart_coordinator()
        assert await site.tokens() == expected
        (deployment,) = await client.deployments()
        assert deployment.epoch == 1, "nodes keep their stages"
        for name in ("a", "b"):
            await site.restart_agents(name)
            assert await site.tokens() == expected
        await site.runs("9.0.0")

        # The wire version changes: old agents are refused, until all are upgraded.
        site.use(other)
        await site.restart_coordinator()
        for name in ("a", "b"):
            await site.refused(name)
        assert not any(node.connected for node in await client.nodes())
        await site.restart_agents("a", "b")
        assert await site.tokens() == expected
        await site.runs("9.1.0")

        # The way back, with a state of the same form.
        site.use(same)
        await site.restart_coordinator()
        await site.restart_agents("a", "b")
        assert await site.tokens() == expected
