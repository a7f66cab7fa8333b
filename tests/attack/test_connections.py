"""Connections that show no certificate end, and however many there are, those who have one are
answered."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edgeshard.client import Client
from edgeshard.domain.identity import Role
from edgeshard.rpc import server as servers
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import EnrolmentServer, Server
from tests.attack import connections
from tests.support.identities import Identities

pytestmark = pytest.mark.timing


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HANDSHAKE_S", 1.0, raising=False)


@pytest.mark.parametrize("kind", ["silent", "half"])
@pytest.mark.parametrize("port", ["members", "joiners", "plaintext"])
@pytest.mark.usefixtures("hurried")
async def test_a_connection_that_shows_nothing_ends(
    kind: connections.Kind, port: str, tmp_path: Path
) -> None:
    own = Identities(tmp_path).coordinator()
    tls = None if port == "plaintext" else own
    server = (
        EnrolmentServer("127.0.0.1:0", own) if port == "joiners" else Server("127.0.0.1:0", tls)
    )
    address = await server.start()
    try:
        outcome = await connections.hold(address, count=20, seconds=20.0, kind=kind)
        assert outcome.made == 20 and outcome.still_open == 0
    finally:
        await server.stop(0)


@pytest.mark.usefixtures("hurried")
async def test_there_are_so_many_at_most_and_a_member_comes_in(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.coordinator(), most_connections=10)
    address = await server.start()
    attacking = asyncio.create_task(connections.hold(address, count=60, seconds=0.5))
    channel = open_channel(address, identities.of(Role.CLIENT, "app"))
    try:
        await asyncio.sleep(0.1)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
        outcome = await attacking
        assert outcome.made == 60 and 0 < outcome.most_open <= 10
    finally:
        await channel.close()
        await server.stop(0)


COORDINATOR = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320))
from edgeshard_coordinator.entry import main
main()
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of one with few descriptors, which writes to the file `log`."""
    ready = tmp_path / "ready"
    options = [
        "--state-dir",
        str(tmp_path / "state"),
        "--listen",
        "127.0.0.1:0",
        "--ready-file",
        str(ready),
    ]
    with (tmp_path / "log").open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", COORDINATOR, *options], stderr=file)
    try:
        until = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.1)
        yield json.loads(ready.read_text())["address"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
async def test_a_coordinator_outlives_more_connections_than_it_has_descriptors(
    coordinator: str, tmp_path: Path
) -> None:
    """Strangers hold all that they get. Connected clients are answered, later ones too, and the log
    stays small."""
    async with Client(coordinator) as early:
        await early.nodes()
        attacking = asyncio.create_task(connections.hold(coordinator, count=400, seconds=40.0))
        for _ in range(13):
            await early.nodes()
            await asyncio.sleep(1.0)
        async with Client(coordinator) as late:
            await late.nodes()
        outcome = await attacking
    assert outcome.still_open == 0 and outcome.most_open <= 32
    assert (tmp_path / "log").stat().st_size < 100_000
