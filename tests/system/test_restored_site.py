"""A site is backed up under load and serves on; its disk is lost, and it is restored at another
address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edgeshard import Client
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.local.user_files import to_toml
from edgeshard.rpc.addresses import free_port
from edgeshard.rpc.tls_files import tls_files
from tests.support.membership import edgectl
from tests.support.site import MakeSpec

pytestmark = [pytest.mark.timing, pytest.mark.long, pytest.mark.timeout(600)]

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
READY_S = 90.0
PROMPT = "Once upon a time"
MODEL = "fairy-tales"


class Mill:
    """A site that `edgectl init` made, with an HTTP endpoint and three nodes, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port("127.0.0.1", 17600, 400)
        self.pki, self.state = directory / "pki", directory / "state/edgeshard/coordinator"
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("EDGESHARD__")
        }
        self.environment = clean | {
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_STATE_HOME": str(directory / "state"),
        }
        self.coordinator: ChildDaemon | None = None
        self.agents: dict[str, ChildDaemon] = {}

    async def edgectl(self, *arguments: str) -> str:
        code, printed, said = await edgectl(*arguments, environment=self.environment)
        assert code == 0, said
        return str(printed)

    async def start_coordinator(self, config: Path, port: int) -> None:
        """At `port` of loopback, with its HTTP endpoint at any port."""
        listen = {
            "--listen": f"127.0.0.1:{port}",
            "--enrol-listen": "127.0.0.1:0",
            "--http-listen": "127.0.0.1:0",
        }
        arguments = ["--config", str(config)]
        self.coordinator = ChildDaemon(
            "coordinator", "edgeshard_coordinator", arguments, self.directory, listen=listen
        )
        await self.coordinator.start()
        await self.coordinator.wait_ready(READY_S)

    def agent_config(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    async def start_agent(self, name: str) -> None:
        agent = ChildDaemon(
            name, "edgeshard_agent", ["--config", str(self.agent_config(name))], self.directory
        )
        self.agents[name] = agent
        await agent.start()
        await agent.wait_ready(READY_S)

    async def add_agent(self, name: str) -> None:
        await self.edgectl("certificate", "agent", name, "-d", str(self.pki))
        files = tls_files(self.pki / name)
        own = self.directory / f"{name}-files"  # the files of the node's own machine
        shutil.copytree(files.key.parent, own)
        files = tls_files(own)
        values = {
            "name": name,
            "coordinator": f"127.0.0.1:{self.port}",
            "listen": "127.0.0.1:0",
            "state_dir": str(self.directory / name),
            "tls_ca": str(files.ca),
            "tls_cert": str(files.cert),
            "tls_key": str(files.key),
            "threads": 1,
        }
        self.agent_config(name).write_text(to_toml("agent", values))
        await self.start_agent(name)

    def client(self) -> Client:
        assert self.coordinator is not None
        return Client(self.coordinator.address, tls_files(self.pki / "admin"))

    async def lose_the_coordinator(self) -> None:
        """Its process ends at once, and its disk is gone."""
        assert self.coordinator is not None
        await self.coordinator.kill()
        shutil.rmtree(self.pki)
        shutil.rmtree(self.state)

    async def stop(self) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))
        if self.coordinator is not None:
            await self.coordinator.stop()


async def status_over_http(url: str, key: str) -> int:
    """The status of a chat of one token with `key`."""
    body = {"model": "tales", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}

    def call() -> int:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(call)


async def ready(client: Client, above: int = 0) -> Deployment:
    """The deployment, once it is ready in an epoch above one."""
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(EdgeShardError):
                (deployment,) = await client.deployments()
                if deployment.phase is DeploymentPhase.READY and deployment.epoch > above:
                    return deployment
            await asyncio.sleep(0.2)


async def tokens(client: Client) -> tuple[int, ...]:
    return (await client.complete("tales", PROMPT, max_new_tokens=16)).token_ids


async def more(ended: list[str], count: int) -> None:
    """Wait until `count` more requests have ended."""
    least = len(ended) + count
    async with asyncio.timeout(READY_S):
        while len(ended) < least:  # noqa: ASYNC110 - a list cannot be awaited
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def load(client: Client) -> AsyncIterator[list[str]]:
    """Send requests, four at a time, and yield the texts of the ended ones."""
    ended: list[str] = []

    async def ask() -> None:
        while True:
            ended.append((await client.complete("tales", PROMPT, max_new_tokens=24)).text)

    asking = [asyncio.ensure_future(ask()) for _ in range(4)]
    try:
        yield ended
    finally:
        for task in asking:
            task.cancel()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


@pytest.fixture
async def mill(tmp_path: Path) -> AsyncIterator[Mill]:
    mill = Mill(tmp_path)
    await mill.edgectl("init", "mill", "-d", str(mill.pki), "--listen", f"127.0.0.1:{mill.port}")
    try:
        await mill.start_coordinator(mill.pki / "coordinator.toml", mill.port)
        await asyncio.gather(*(mill.add_agent(name) for name in ("a", "b", "c")))
        yield mill
    finally:
        await mill.stop()


async def test_a_lost_site_is_restored_here_and_at_another_address(
    mill: Mill, make_spec: MakeSpec
) -> None:
    backup, config = mill.directory / "mill.backup", str(mill.pki / "coordinator.toml")
    async with mill.client() as client:
        await client.add_model(DEMO_MODEL, MODEL)
        first = await client.deploy(make_spec())
        await client.create_key("early")
        _, key = await client.create_key("robot")
        expected = await tokens(client)
        async with load(client) as ended:
            await more(ended, 4)
            await mill.edgectl("backup", str(backup), "--config", config)
            await more(ended, 8)
        # The site serves on: it revokes a key, and reaches higher epochs and terms.
        await client.revoke_key("early")
        await mill.agents["b"].kill()
        await mill.start_agent("b")
        later = await ready(client, first.epoch)
        assert await tokens(client) == expected
    assert mill.coordinator is not None
    for _ in range(2):
        await mill.coordinator.stop()
        await mill.start_coordinator(Path(config), mill.port)
    async with mill.client() as client:
        await ready(client)

    # Nodes run on meanwhile. They have followed higher terms, and hold stages of higher epochs.
    await mill.lose_the_coordinator()
    printed = await mill.edgectl("restore", str(backup), "-d", str(mill.pki))
    assert f"--name {MODEL}" in printed
    await mill.start_coordinator(mill.pki / "coordinator.toml", mill.port)
    async with mill.client() as client:
        await client.add_model(DEMO_MODEL, MODEL)
        restored = await ready(client)
        assert restored.epoch > later.epoch
        assert await tokens(client) == expected
        assert {key.name for key in await client.keys()} == {"early", "robot"}, (
            "a key revoked later is valid again"
        )
    for name in ("a", "b", "c"):
        assert "STALE_COORDINATOR" not in mill.agents[name].log_path.read_text()
    assert await status_over_http(mill.coordinator.gateway, key) == 200

    # Lost once more, and restored from the same backup at another address.
    await mill.lose_the_coordinator()
    await mill.edgectl("restore", str(backup), "-d", str(mill.pki))
    moved = free_port("127.0.0.1", mill.port + 1, 400)
    await mill.start_coordinator(mill.pki / "coordinator.toml", moved)
    for name, agent in mill.agents.items():
        await mill.edgectl(
            "set-coordinator", f"127.0.0.1:{moved}", "--config", str(mill.agent_config(name))
        )
        await agent.stop()
    await asyncio.gather(*(mill.start_agent(name) for name in tuple(mill.agents)))
    await mill.edgectl("set-coordinator", f"127.0.0.1:{moved}")
    await mill.edgectl("model", "add", str(DEMO_MODEL), "--name", MODEL)
    async with mill.client() as client:
        await ready(client)
        assert await tokens(client) == expected
        assert {node.name for node in await client.nodes() if node.connected} == {"a", "b", "c"}
    assert await status_over_http(mill.coordinator.gateway, key) == 200
    assert await status_over_http(mill.coordinator.gateway, key[:-1]) == 401
