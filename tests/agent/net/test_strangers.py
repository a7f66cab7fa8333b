"""Only the node that the placement names opens a hop: another node or an application cannot, and
does not disturb it.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_agent.net.link_receiver import LinkReceiver, StageServicer

from edgeshard import WIRE_VERSION
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import DeploymentName, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub, add_StageServiceServicer_to_server
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.frames import FrameContract
from edgeshard.wire.status import from_rpc_error
from tests.support.identities import Identities, is_denied

pytestmark = pytest.mark.timing

NAME = DeploymentName("tales")
HELLO = pb.LinkHello(
    deployment=NAME,
    epoch=1,
    from_stage=0,
    to_stage=1,
    dialler_sends=True,
    wire_version=WIRE_VERSION,
)


async def dial(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    """A stream, and its welcome."""
    call: Any = StageServiceStub(channel).Exchange()
    await call.write(pb.ExchangeRequest(message=pb.LinkMessage(hello=HELLO)))
    return call, await call.read()


@pytest.mark.parametrize(
    "stranger", [(Role.AGENT, "c"), (Role.CLIENT, "a"), (Role.OPERATOR, "a")], ids=str
)
async def test_a_hop_is_opened_by_the_node_before_it_alone(
    tmp_path: Path, stranger: tuple[Role, str]
) -> None:
    identities = Identities(tmp_path)
    server, servicer = Server("127.0.0.1:0", identities.of(Role.AGENT, "b")), StageServicer()
    add_StageServiceServicer_to_server(servicer, server.grpc)
    contract = FrameContract(NAME, 1, DType.FLOAT32, 4, 8, 2)
    servicer.open(
        NAME, 1, LinkReceiver(0, NodeName("a"), contract, lambda step: None, lambda step: None)
    )
    address, node = await server.start(), NodeName("b")
    try:
        async with (
            open_channel(address, identities.of(Role.AGENT, "a"), node=node) as before,
            open_channel(address, identities.of(*stranger), node=node) as strange,
        ):
            call, welcome = await dial(before)
            assert welcome.message.HasField("welcome")
            for epoch in (0, 1, 2):
                hello = pb.LinkHello()
                hello.CopyFrom(HELLO)
                hello.epoch = epoch
                opening: Any = StageServiceStub(strange).Exchange()
                first = pb.ExchangeRequest(message=pb.LinkMessage(hello=hello))
                if stranger[0] is not Role.AGENT:
                    assert await is_denied(opening, first)
                    continue
                # As if there were no such stage: a stranger learns no epoch.
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await opening.write(first)
                    await opening.read()
                assert from_rpc_error(refused.value).reason == "NO_SUCH_STAGE"
            assert (await call.read()).message.HasField("beacon") and not call.done()
            call.cancel()
    finally:
        await server.stop(0)


async def test_a_node_is_dialled_by_its_name_and_nobody_else_answers_for_it(tmp_path: Path) -> None:
    """As when another node of the site listens at its address."""
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.of(Role.AGENT, "c"))
    add_StageServiceServicer_to_server(StageServicer(), server.grpc)
    address = await server.start()
    try:
        async with open_channel(
            address, identities.of(Role.AGENT, "a"), node=NodeName("b")
        ) as channel:
            call: Any = StageServiceStub(channel).Exchange()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(pb.ExchangeRequest(message=pb.LinkMessage(hello=HELLO)))
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)
