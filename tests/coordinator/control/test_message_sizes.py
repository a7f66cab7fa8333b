"""A message that gRPC would refuse fails only its own request: streams are shared."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from edgeshard_coordinator.control.requests import head_reports
from edgeshard_coordinator.control.requests.listeners import ListenerFeed
from edgeshard_coordinator.control.runtime.hub import MAX_UNREAD, ControlHub

from edgeshard.domain.control.commands import CommandKey, CommandKind, MeasureCompute, ReleaseStage
from edgeshard.domain.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, OperationId, RequestId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import Effort
from edgeshard.domain.requests.generation import FinishReason, Generation, Started, Token
from edgeshard.domain.requests.head import RequestAccepted, RequestEnd, StartRequest
from edgeshard.proto.v1 import head_pb2, inference_pb2
from edgeshard.rpc.channel import MESSAGE_LIMIT_BYTES, is_sendable
from edgeshard.wire.listening import heard_to_wire
from tests.support.heads import say
from tests.support.scripted_agent import DEADLINE_S

UNSENDABLE: dict[str, tuple[StartRequest, type]] = {
    "too large": (
        StartRequest(RequestId("large"), Generation("x" * (12 << 20)), (2**32 - 1,) * (1 << 20)),
        InvalidArgumentError,
    ),
    "of no numbers of the wire": (
        StartRequest(RequestId("large"), Generation((2**40,))),
        InternalError,
    ),
}


async def running(site: Any, head: Any, name: str) -> Any:
    call = site.generate(name)
    await head.next_start()
    await head.accept(name)
    assert (await site.read(call)).HasField("started")
    return call


async def test_a_request_just_below_the_limit_of_grpc_is_refused_by_name_and_others_go_on(
    site: Any, failing: Any
) -> None:
    _, head = await site.deployed()
    other = await running(site, head, "other")
    request = inference_pb2.GenerateRequest(
        model="tale", generation=head_pb2.Generation(max_new_tokens=8)
    )
    request.generation.prompt = "x" * (MESSAGE_LIMIT_BYTES - 40 - request.ByteSize())
    assert MESSAGE_LIMIT_BYTES - 64 < request.ByteSize() < MESSAGE_LIMIT_BYTES
    async with failing(InvalidArgumentError) as caught:
        await site.inference.Generate(request, timeout=DEADLINE_S).read()
    assert caught[0].field == "prompt" and caught[0].reason == "PROMPT_TOO_LONG"
    await head.token("other", 3, 10)
    assert (await site.read(other)).token.token == 10


@pytest.mark.parametrize("what", UNSENDABLE)
async def test_a_request_that_cannot_be_sent_to_the_head_fails_alone(
    site: Any, failing: Any, what: str
) -> None:
    """For any field that made it grow."""
    start, kind = UNSENDABLE[what]
    _, head = await site.deployed()
    other = await running(site, head, "other")
    large = await running(site, head, "large")
    site.coordinator.front._attachments["tale"].outgoing.put_nowait(start)
    async with failing(kind):
        await site.read(large)
    await head.token("other", 3, 10)
    assert (await site.read(other)).token.token == 10
    assert site.coordinator.front.active_requests("tale") == 1


@pytest.mark.parametrize("longest", [3 << 20, 15 << 20])
async def test_texts_that_gathered_go_in_messages_that_can_be_sent(
    site: Any, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several requests and of one; a text that does not fit into a message is not lost,
    and the end is last.
    """
    # a head may send less for one token
    monkeypatch.setattr(head_reports, "FIRST_CHARACTERS", 3 * longest)
    await site.deployed(concurrency=4)
    stream = ListenerFeed()
    names = ("r1", "r2", "r3")
    expected = list[tuple[int, int]]()
    for number, name in enumerate(names):
        request = site.coordinator.front.start("tale", Generation("once"), RequestId(name))
        tell = partial(say, site.coordinator.front, request.attachment, request.request_id)
        tell(RequestAccepted((1, 2, 3)))
        assert isinstance(await request.first(), Started)
        for position, size in ((3, 4), (4, longest), (5, longest), (6, 4)):
            tell(Token(position, 7, "x" * size))
            expected.append((number, position))
        tell(RequestEnd(FinishReason.LENGTH, ""))
        stream.follow(number, request)
    heard, ended = list[tuple[int, int]](), list[int]()
    stream.finish()
    async for message in stream.heard():
        assert is_sendable(heard_to_wire(message)), (
            "gRPC would end the stream of all requests of this client"
        )
        heard += [(number, token.position) for number, token in message.tokens]
        ended += [number for number, _ in message.ends]
    assert sorted(heard) == expected and all(
        a < b for a, b in pairwise(h for h in heard if h[0] == 1)
    )
    assert sorted(ended) == [0, 1, 2]


async def test_a_stream_that_its_node_does_not_read_ends() -> None:
    stream = ControlHub().open(NodeId("id-a"), "i1")
    command = ReleaseStage(DeploymentName("tale"), Epoch(1))
    for number in range(2 * MAX_UNREAD):
        stream.send(OperationId(str(number)), command)
    waiting = [stream.outgoing.get_nowait() for _ in range(stream.outgoing.qsize())]
    assert len(waiting) == MAX_UNREAD + 1
    assert isinstance(waiting[-1], ResourceExhaustedError) and waiting[-1].reason == "SLOW_READER"


async def test_a_command_that_cannot_be_sent_is_refused_and_the_node_stays(site: Any) -> None:
    (agent,) = await site.connected("a")
    connection = site.state.nodes[agent.node_id].connection
    keys = [
        CommandKey(uid, Epoch(0), CommandKind.MEASURE, 0).operation_id for uid in ("large", "small")
    ]
    for key, size in zip(keys, (17 << 20, 1), strict=True):
        command = MeasureCompute(
            {"comment": "x" * size}, DType.FLOAT32, effort=Effort.QUICK, again=False
        )
        site.coordinator._hub.send(agent.node_id, connection, key, command)
    await agent.until(lambda agent: bool(agent.operation_ids))
    assert (
        agent.operation_ids == [keys[1]]
        and site.state.nodes[agent.node_id].connection == connection
    )
