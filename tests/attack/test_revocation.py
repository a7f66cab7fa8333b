"""A revoked certificate leaves nothing open for long, at the coordinator and at nodes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from edgeshard_agent.net import link_receiver
from edgeshard_agent.net.link_receiver import StageServicer

from edgeshard.domain.errors import DeniedError
from edgeshard.domain.identity import Denial, Principal, Role
from edgeshard.domain.ids import NodeName
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub, add_StageServiceServicer_to_server
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from tests.attack import revocation
from tests.support.identities import Identities
from tests.support.membership import SecureSite, joined

pytestmark = pytest.mark.timing
SECONDS = 10.0
"""A quiet machine needs 0.1 s; a call that is left open stays so for good."""


async def test_a_client_that_is_revoked_hears_nothing_more(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as mill, mill.client_of() as admin:
        eve = await joined(mill, Role.CLIENT, "eve")

        async def revoke() -> None:
            await admin.revoke(Role.CLIENT, "eve")

        ends = await revocation.linger(mill.coordinator.address, eve, revoke, seconds=SECONDS)
        assert ends == {"Watch": "PERMISSION_DENIED", "Listen": "PERMISSION_DENIED"}
        with pytest.raises(DeniedError):
            async with mill.client_with(eve) as client:
                await client.served_models()


async def test_an_operator_that_revokes_itself_is_told_that_it_is_done(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as mill, mill.client_of(Role.OPERATOR, "kim") as kim:
        await kim.revoke(Role.OPERATOR, "kim")
        with pytest.raises(DeniedError):
            await kim.nodes()


async def test_a_node_that_is_revoked_probes_no_other(tmp_path: Path) -> None:
    """An idle probe and a running one. A node that did nothing keeps its own."""
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.of(Role.AGENT, "a"))
    add_StageServiceServicer_to_server(StageServicer(), server.grpc)
    address = await server.start()

    async def revoke() -> None:
        server.denials.replace([Denial(Principal("site", Role.AGENT, "eve"))])

    try:
        async with open_channel(
            address, identities.of(Role.AGENT, "b"), node=NodeName("a")
        ) as channel:
            honest = await revocation._probe(channel)
            files = identities.of(Role.AGENT, "eve")
            ends = await revocation.linger(address, files, revoke, node="a", seconds=SECONDS)
            assert ends == dict.fromkeys(("Watch", "Probe", "idle"), "PERMISSION_DENIED")
            await revocation._probe_once(honest)
            assert not honest.done()
    finally:
        await server.stop(0)


async def test_a_nodes_probes_have_one_budget_however_often_it_dials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_receiver, "HELD_BYTES", 5000)
    monkeypatch.setattr(link_receiver, "BYTES_PER_S", 1)
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.of(Role.AGENT, "a"))
    add_StageServiceServicer_to_server(StageServicer(), server.grpc)
    address = await server.start()
    try:
        for _ in range(4):  # 4 x 1024 bytes are within it
            async with open_channel(
                address, identities.of(Role.AGENT, "eve"), node=NodeName("a")
            ) as channel:
                await revocation._probe(channel)
        async with open_channel(
            address, identities.of(Role.AGENT, "eve"), node=NodeName("a")
        ) as channel:
            await refused(channel)
        async with open_channel(
            address, identities.of(Role.AGENT, "b"), node=NodeName("a")
        ) as channel:
            held = [await revocation._probe(channel) for _ in range(link_receiver.MOST_STREAMS)]
            await refused(channel)
            assert not any(call.done() for call in held)
    finally:
        await server.stop(0)


async def refused(channel: grpc.aio.Channel) -> None:
    """One more probe is, because of those before it. Its write may fail first, by another code."""
    call = StageServiceStub(channel).Probe()
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await revocation._probe_once(call)
    async with asyncio.timeout(30):
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
