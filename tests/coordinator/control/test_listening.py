"""Tokens of all requests of a client over one stream: the client's listener, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.requests.listeners import ListenerFeed
from edgeshard_coordinator.control.requests.running_request import RunningRequest

from edgeshard.client import Client
from edgeshard.domain.errors import (
    AlreadyExistsError,
    DeadlineError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.generation import (
    UNREAD_TOKENS,
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    Token,
)
from edgeshard.proto.v1 import head_pb2, inference_pb2
from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing

LISTENER = "mine"


def asking(name: str, number: int, listener: str = LISTENER) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model="tale",
        request_id=name,
        generation=head_pb2.Generation(prompt="once", max_new_tokens=100_000),
        listener=inference_pb2.Listener(id=listener, number=number),
    )


class Caller:
    """A client of raw messages: one listener, and requests that name it."""

    def __init__(self, site: Any, head: Any) -> None:
        self.site, self.head = site, head
        self.calls: dict[str, Any] = {}
        self.listen: Any = None

    async def open(self) -> None:
        self.listen = self.site.inference.Listen()
        await self.listen.write(inference_pb2.ListenRequest(listener=LISTENER))
        await asyncio.wait_for(self.listen.initial_metadata(), DEADLINE_S)

    async def start(self, name: str, number: int) -> Any:
        """Start a request; return the first message of its call."""
        self.calls[name] = self.site.inference.Generate(asking(name, number), timeout=DEADLINE_S)
        await self.head.next_start()
        await self.head.accept(name)
        return await self.site.read(self.calls[name])

    async def hear(self) -> Any:
        return await self.site.read(self.listen)


@pytest.fixture
async def caller(site: Any) -> Caller:
    _, head = await site.deployed(concurrency=8, max_new_tokens=1_000_000)
    caller = Caller(site, head)
    await caller.open()
    return caller


async def collect(
    client: Client, name: str, seen: list[GenerationEvent] | None = None, most: int = 8
) -> list[GenerationEvent]:
    seen = [] if seen is None else seen
    async for event in client.generate("tale", "once", max_new_tokens=most, request_id=name):
        seen.append(event)
    return seen


async def test_tokens_that_are_there_together_come_in_one_message(caller: Caller) -> None:
    started = [await caller.start(name, number) for number, name in ((7, "r1"), (9, "r2"))]
    assert all(message.listened for message in started)
    await caller.head.tokens(("r1", 3, 10), ("r2", 3, 20))
    (step,) = (await caller.hear()).steps
    assert (list(step.numbers), list(step.tokens), list(step.texts)) == (
        [7, 9],
        [10, 20],
        ["<10>", "<20>"],
    )
    await caller.head.token("r1", 4, 11)
    (step,) = (await caller.hear()).steps
    assert (list(step.numbers), list(step.positions), list(step.tokens)) == ([7], [4], [11])
    await caller.head.finish("r1")
    (end,) = (await caller.hear()).ends
    assert (end.number, end.finished.new_token_count) == (7, 2)
    ended = await asyncio.wait_for(caller.calls["r1"].read(), DEADLINE_S)
    assert ended is grpc.aio.EOF, "the call ends in order, behind its start"


async def test_a_request_that_nobody_reads_holds_up_no_other(caller: Caller) -> None:
    site, head = caller.site, caller.head
    await caller.start("slow", 1)
    await caller.start("fast", 2)
    for position in range(3, 3 + UNREAD_TOKENS + 40):
        await head.token("slow", position, position)
    await head.token("fast", 3, 50)
    heard: list[int] = []
    fast: list[int] = []
    while not fast:
        for step in (await caller.hear()).steps:
            for number, token in zip(step.numbers, step.tokens, strict=True):
                (heard if number == 1 else fast).append(token)
    assert fast == [50] and heard == list(range(3, 3 + UNREAD_TOKENS)), (
        "no more than the window came"
    )
    await caller.listen.write(
        inference_pb2.ListenRequest(read=inference_pb2.TokensRead(number=1, count=30))
    )
    while len(heard) < UNREAD_TOKENS + 30:
        heard += [token for step in (await caller.hear()).steps for token in step.tokens]
    assert heard == list(range(3, 3 + UNREAD_TOKENS + 30)), "in order, nothing twice"
    # Unread messages of one request do not delay the end of another.
    await head.finish("fast")
    assert [end.number for end in (await caller.hear()).ends] == [2]
    assert site.coordinator.front.active_requests("tale") == 1


async def test_a_request_too_far_behind_is_given_up(open_site: Any) -> None:
    site = await open_site(backlog_limit=20)
    _, head = await site.deployed(max_new_tokens=1_000_000)
    caller = Caller(site, head)
    await caller.open()
    await caller.start("slow", 1)
    position, heard = itertools.count(3), 0
    async with asyncio.timeout(DEADLINE_S):
        while head.down.empty():
            await head.token("slow", next(position), 1)
    assert await head.next_cancel() == "slow"
    while not (message := await caller.hear()).ends:
        heard += sum(len(step.tokens) for step in message.steps)
    assert message.ends[0].failure.reason == "SLOW_READER" and heard <= UNREAD_TOKENS


async def test_a_request_that_leaves_takes_no_other_with_it(site: Any) -> None:
    _, head = await site.deployed(concurrency=8, max_new_tokens=1_000_000)
    async with Client(site.address) as client:
        events = client.generate("tale", "once", max_new_tokens=8, request_id="r1")
        begun = asyncio.create_task(anext(events))
        await head.next_start()
        staying = asyncio.create_task(collect(client, "r2"))
        await head.next_start()
        for name in ("r1", "r2"):
            await head.accept(name)
        await head.tokens(("r1", 3, 10), ("r2", 3, 20))
        async with asyncio.timeout(DEADLINE_S):
            await begun
            assert isinstance(await anext(events), Token)
            await events.aclose()
        assert await head.next_cancel() == "r1"
        await head.tokens(("r1", 4, 11), ("r2", 4, 21))
        await head.finish("r1", head_pb2.FINISH_REASON_CANCELLED)
        await head.finish("r2")
        answer = await asyncio.wait_for(staying, DEADLINE_S)
    assert [event.token for event in answer if isinstance(event, Token)] == [20, 21]
    assert isinstance(answer[-1], Finished)


async def test_nothing_is_said_of_a_request_whose_call_is_over() -> None:
    """Its last token may have come between: an end without it would be a wrong answer."""
    stream = ListenerFeed()
    request = RunningRequest(RequestId("r"), DeploymentName("tale"), Generation("once"))
    stream.leave(stream.follow(1, request))
    request.deliver(Finished(FinishReason.STOP, "", 1, 1))
    stream.finish()
    assert [heard async for heard in stream.heard()] == []


async def test_a_long_answer_is_read_beyond_the_window(site: Any) -> None:
    """The client reports the bytes that its application has read, or the coordinator would stop at
    the window."""
    _, head = await site.deployed(max_new_tokens=1_000_000)
    count = 3 * UNREAD_TOKENS
    async with Client(site.address) as client:
        answer = asyncio.create_task(collect(client, "r1", most=100_000))
        await head.next_start()
        await head.accept("r1")
        for position in range(3, 3 + count):
            await head.token("r1", position, position)
        await head.finish("r1")
        events = await asyncio.wait_for(answer, DEADLINE_S)
    assert [event.token for event in events if isinstance(event, Token)] == list(
        range(3, 3 + count)
    )


async def test_a_failure_comes_after_the_tokens_with_its_type(site: Any) -> None:
    _, head = await site.deployed()
    seen: list[GenerationEvent] = []
    async with Client(site.address) as client:
        running = asyncio.create_task(collect(client, "r1", seen))
        await head.next_start()
        await head.accept("r1")
        await head.token("r1", 3, 10)
        await head.fail("r1", InvalidArgumentError("what went wrong", field="stop"))
        with pytest.raises(InvalidArgumentError, match="what went wrong") as caught:
            await asyncio.wait_for(running, DEADLINE_S)
    assert caught.value.field == "stop" and [e.token for e in seen if isinstance(e, Token)] == [10]


async def test_a_listened_request_beyond_its_time_is_cancelled(site: Any) -> None:
    _, head = await site.deployed()
    async with Client(site.address) as client:
        running = asyncio.create_task(
            client.complete("tale", "once", request_id="r1", timeout_s=5.0, max_new_tokens=8)
        )
        await head.next_start()
        await head.accept("r1")
        with pytest.raises(DeadlineError):
            await asyncio.wait_for(running, DEADLINE_S)
        assert await head.next_cancel() == "r1"


async def test_requests_end_with_their_listener(caller: Caller, failing: Any) -> None:
    await caller.start("r1", 1)
    caller.listen.cancel()
    async with failing(UnavailableError) as caught:
        await caller.site.read(caller.calls["r1"])
    assert caught[0].reason == "LISTENER_LOST"
    assert await caller.head.next_cancel() == "r1"


async def test_a_listener_is_found_on_its_own_connection_only(caller: Caller) -> None:
    """Tokens of somebody else, or of a listener that the coordinator does not know, come by the
    request's own call."""
    site, head = caller.site, caller.head
    other, _ = site.own_inference()
    for stub, name, listener in ((other, "r1", LISTENER), (site.inference, "r2", "no such")):
        call = stub.Generate(asking(name, 1, listener), timeout=DEADLINE_S)
        await head.next_start()
        await head.accept(name)
        assert not (await site.read(call)).listened
        await head.token(name, 3, 10)
        assert (await site.read(call)).token.token == 10
        call.cancel()
        await head.next_cancel()


async def test_a_number_and_an_id_are_for_one_at_a_time(caller: Caller, failing: Any) -> None:
    await caller.start("r1", 1)
    second = caller.site.inference.Generate(asking("r2", 1), timeout=DEADLINE_S)
    await caller.head.next_start()
    await caller.head.accept("r2")
    async with failing(AlreadyExistsError) as caught:
        while True:
            await caller.site.read(second)
    assert caught[0].field == "listener.number"
    again = caller.site.inference.Listen()
    await again.write(inference_pb2.ListenRequest(listener=LISTENER))
    async with failing(AlreadyExistsError):
        await caller.site.read(again)


async def test_a_listener_names_itself_first(site: Any, failing: Any) -> None:
    call = site.inference.Listen()
    await call.write(inference_pb2.ListenRequest(read=inference_pb2.TokensRead(number=1, count=1)))
    async with failing(InvalidArgumentError) as caught:
        await site.read(call)
    assert caught[0].field == "listener"


async def test_a_request_cancelled_from_elsewhere_finishes(site: Any) -> None:
    _, head = await site.deployed()
    async with Client(site.address) as client:
        running = asyncio.create_task(collect(client, "r1"))
        await head.next_start()
        await head.accept("r1")
        await head.token("r1", 3, 10)
        assert await client.cancel("r1")
        assert await head.next_cancel() == "r1"
        await head.finish("r1", head_pb2.FINISH_REASON_CANCELLED)
        events = await asyncio.wait_for(running, DEADLINE_S)
    assert isinstance(events[-1], Finished) and events[-1].reason == "cancelled"


@pytest.mark.parametrize("accepted", [False, True])
async def test_stopping_ends_listened_requests_with_a_typed_error(
    open_site: Callable[..., Any], accepted: bool
) -> None:
    site = await open_site()
    _, head = await site.deployed()
    async with Client(site.address) as client:
        # It tries to reconnect for this time.
        events = client.generate("tale", "once", max_new_tokens=8, timeout_s=3)
        running = asyncio.create_task(anext(events))
        request_id = (await head.next_start()).request_id
        if accepted:
            await head.accept(request_id)
            await asyncio.wait_for(running, DEADLINE_S)
            running = asyncio.create_task(anext(events))
        async with asyncio.timeout(20):
            await site.coordinator.stop()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(running, DEADLINE_S)


async def test_a_listener_that_broke_leaves_no_task_behind(site: Any) -> None:
    """A client that outlives many coordinators would collect them."""
    await site.deployed()
    async with Client(site.address) as client:
        asked = asyncio.create_task(collect(client, "r1"))
        await asyncio.sleep(0)
        listener = client._connection._listener
        assert listener is not None
        await asyncio.wait_for(listener._call.initial_metadata(), DEADLINE_S)
        listener._call.cancel()
        _, running = await asyncio.wait(listener._tasks, timeout=DEADLINE_S)
        assert not running
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
