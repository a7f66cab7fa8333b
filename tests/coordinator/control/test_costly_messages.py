"""Messages that once held the coordinator for seconds, without a pause: each ends in a typed
refusal, at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from edgeshard.domain.control.commands import ControlHello
from edgeshard.domain.ids import MAX_EPOCH
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1 import profile_pb2
from edgeshard.wire.control import agent_message_to_wire
from edgeshard.wire.status import from_rpc_error
from tests.support.forms import in_form
from tests.support.scripted_agent import DEADLINE_S, FakeAgent
from tests.support.watchdog import watching

pytestmark = pytest.mark.timing

SECONDS = in_form(1, 30)
LIMIT_S = 0.1
"""Limit of processor time, for one message."""
SERVICE = "/edgeshard.proto.v1.CoordinatorService"


def raw(agent: FakeAgent, method: str, message: Any) -> Callable[[], Awaitable[Any]]:
    """A call that sends the bytes of a message, so that nothing is counted for making them."""
    data = message.SerializeToString()
    call: Any = agent._channel.unary_unary(f"{SERVICE}/{method}")
    return lambda: call(data, timeout=DEADLINE_S)


def heartbeat(agent: FakeAgent, epoch: int) -> pb.HeartbeatRequest:
    stage = {"deployment": "tale", "epoch": epoch, "layers": {"first": 0, "end": 1}}
    return pb.HeartbeatRequest(
        node_id=agent.node_id, incarnation=agent.registration.incarnation, stages=[stage]
    )


def profile(agent: FakeAgent, samples: int) -> pb.ReportProfileRequest:
    rows = [{"count": 1 + number, "seconds": 0.001, "repeats": 1} for number in range(samples)]
    layer: Any = {"kind": "block", "layers": 1, "prefill": rows}
    compute = profile_pb2.ComputeProfile(threads=1, dtype="DATA_TYPE_FLOAT32", layers=[layer])
    return pb.ReportProfileRequest(node_id=agent.node_id, compute=[compute])


def control(agent: FakeAgent, message: pb.ControlRequest) -> Callable[[], Awaitable[Any]]:
    """A control stream on which a message follows the first one, to its end."""
    hello = agent_message_to_wire(
        ControlHello(agent.node_id, agent.registration.incarnation)
    ).SerializeToString()
    data = message.SerializeToString()
    call: Any = agent._channel.stream_stream(f"{SERVICE}/Control")

    async def send() -> None:
        stream = call(timeout=DEADLINE_S)
        await stream.write(hello)
        await stream.write(data)
        while await stream.read() is not grpc.aio.EOF:
            pass

    return send


@pytest.mark.parametrize("samples", [201, 4_000, 200_000])
async def test_a_profile_with_many_samples(site: Any, samples: int) -> None:
    (agent,) = await site.connected("m")
    await refused_without_pause(raw(agent, "ReportProfile", profile(agent, samples)), "prefill")


@pytest.mark.parametrize("way", ["call", "stream"])
async def test_a_heartbeat_with_an_epoch_beyond_all(site: Any, way: str) -> None:
    (agent,) = await site.connected("m")
    message = heartbeat(agent, MAX_EPOCH + 1)
    send = (
        raw(agent, "Heartbeat", message)
        if way == "call"
        else control(agent, pb.ControlRequest(heartbeat=message))
    )
    await refused_without_pause(send, "epoch")
    _, head = await site.deployed()
    assert head.epoch == 1


async def refused_without_pause(send: Callable[[], Awaitable[Any]], field: str) -> None:
    # Else a callback pays for a look at all objects that the tests before left.
    gc.collect()
    gc.freeze()
    messages, ends = 0, time.monotonic() + SECONDS
    with watching() as watchdog:
        while time.monotonic() < ends:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send()
            refused = from_rpc_error(caught.value)
            assert (
                caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in refused.field
            )
            messages += 1
    watchdog.check()
    assert messages and watchdog.total_s / messages < LIMIT_S
