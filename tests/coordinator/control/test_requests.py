"""Requests and their tokens, from client to head and back, over real sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from edgeshard.domain.errors import (
    AlreadyExistsError,
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName, ModelName
from edgeshard.proto.v1 import admin_pb2, head_pb2, inference_pb2
from edgeshard.wire.site import traffic_to_wire
from edgeshard.wire.status import from_rpc_error

pytestmark = pytest.mark.timing

DEADLINE_S = 30.0


async def test_tokens_reach_the_client(site: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("r1")
    start = await head.next_start()
    assert (
        start.request_id == "r1" and start.generation.prompt == "once" and not start.emitted_tokens
    )
    await head.accept("r1")
    started = (await site.read(call)).started
    assert list(started.prompt_tokens) == [5, 6, 7] and len(started.placement.stages) == 3
    for index in range(3):
        await head.token("r1", 3 + index, token=10 + index)
        token = (await site.read(call)).token
        assert (token.position, token.token, token.text) == (
            3 + index,
            10 + index,
            f"<{10 + index}>",
        )
    shown = await site.admin.GetDeployment(
        admin_pb2.GetDeploymentRequest(name="tale"), timeout=DEADLINE_S
    )
    assert shown.deployment.active_requests == 1
    await head.finish("r1")
    finished = (await site.read(call)).finished
    assert (finished.prompt_token_count, finished.new_token_count) == (3, 3)
    assert await call.read() is grpc.aio.EOF
    assert site.coordinator.front.active_requests("tale") == 0


async def test_a_token_counts_once_and_in_its_epoch_only(site: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    await head.token("r1", 3, token=66)  # Before the request was accepted.
    await head.accept("r1", epoch=head.epoch + 1)
    await head.accept("r1")
    await head.accept("r1", prompt_tokens=[1])
    await head.token("r1", 3, token=10)
    await head.token("r1", 3, token=66)  # Twice.
    await head.token("r1", 4, token=66, epoch=0)  # A token of an earlier epoch.
    await head.token("r1", 6, token=66)  # Out of order.
    await head.token("other", 3, token=66)
    await head.token("r1", 4, token=11)
    await head.finish("r1")
    messages = [message async for message in call]
    assert [m.token.token for m in messages if m.WhichOneof("message") == "token"] == [10, 11]
    assert messages[-1].finished.new_token_count == 2
    assert site.coordinator.front.reports.dropped_messages == 6


async def test_tokens_that_come_in_one_message_count_one_by_one(site: Any) -> None:
    _, head = await site.deployed()
    calls = {name: site.generate(name) for name in ("r1", "r2")}
    for name in calls:
        await head.next_start()
        await head.accept(name)
    await head.tokens(("r1", 3, 10), ("r2", 3, 20), ("r1", 3, 66), ("r1", 4, 11))
    for name, expected in (("r1", [10, 11]), ("r2", [20])):
        await head.finish(name)
        messages = [message async for message in calls[name]]
        assert [m.token.token for m in messages if m.WhichOneof("message") == "token"] == expected
    assert site.coordinator.front.reports.dropped_messages == 1


async def test_prompt_logprobs_count_once_and_in_their_place(site: Any) -> None:
    _, head = await site.deployed()
    request = inference_pb2.GenerateRequest(
        model="tale", request_id="r1",
        generation=head_pb2.Generation(prompt="once", max_new_tokens=8, prompt_logprobs=True),
    )  # fmt: skip
    call = site.inference.Generate(request, timeout=DEADLINE_S)
    start = await head.next_start()
    assert start.generation.prompt_logprobs and start.scored == 1
    await head.accept("r1", prompt_tokens=[5, 6, 7, 8])
    # out of its place, right, twice, right
    for position, count in (
        (2, 1),
        (1, 2),
        (1, 2),
        (3, 1),
    ):
        await head.prompt_logprobs("r1", position, count)
    await head.token("r1", 4, token=9)
    await head.finish("r1")
    messages = [message async for message in call]
    assert [message.WhichOneof("message") for message in messages] == [
        "started", "prompt_logprobs", "prompt_logprobs", "token", "finished"
    ]  # fmt: skip
    assert [
        (m.prompt_logprobs.position, len(m.prompt_logprobs.logprobs)) for m in messages[1:3]
    ] == [(1, 2), (3, 1)]
    assert site.coordinator.front.reports.dropped_messages == 2


async def test_the_next_head_hears_how_far_the_prompt_was_scored(site: Any) -> None:
    _, head = await site.deployed()
    request = inference_pb2.GenerateRequest(
        model="tale", request_id="r1",
        generation=head_pb2.Generation(prompt="once", max_new_tokens=8, prompt_logprobs=True),
    )  # fmt: skip
    call = site.inference.Generate(request, timeout=DEADLINE_S)
    assert (await head.next_start()).scored == 1
    await head.accept("r1", prompt_tokens=[5, 6, 7, 8])
    await head.prompt_logprobs("r1", 1, 2)
    assert (await site.read(call)).started and (await site.read(call)).prompt_logprobs.position == 1
    head.cancel()
    await head.attach()
    assert (await head.next_start()).scored == 3


LIES = ["prompt", "ids", "token", "text", "top", "nan", "end"]
SCORES = {"scores": 3, "no scores": 0, "scores unasked": 2, "top of scores": 2, "nan scores": 2}
"""How many are reported."""


@pytest.mark.parametrize("lie", [*LIES, *SCORES])
async def test_a_head_that_reports_what_cannot_be_ends_its_request(
    site: Any, failing: Any, lie: str
) -> None:
    """A client's budget is charged by its head's reports."""
    _, head = await site.deployed()
    generation = head_pb2.Generation(max_new_tokens=2, prompt="" if lie == "ids" else "once")
    generation.prompt_logprobs = lie in SCORES and lie != "scores unasked"
    generation.prompt_tokens.extend([5, 6, 7] if lie == "ids" else [])
    request = inference_pb2.GenerateRequest(model="tale", request_id="r1", generation=generation)
    call = site.inference.Generate(request, timeout=DEADLINE_S)
    await head.next_start()
    if lie in ("prompt", "ids"):
        await head.accept("r1", prompt_tokens=range(100_000) if lie == "prompt" else (5, 6, 8))
    elif lie == "end":
        await head.accept("r1")
        await head.finish("r1", text="x" * 70_000)
    elif lie in SCORES:
        await head.accept("r1")
        logprob = math.nan if lie == "nan scores" else -1.0
        await head.prompt_logprobs(
            "r1", 1, SCORES[lie], top=lie == "top of scores", logprob=logprob
        )
    else:
        await head.accept("r1")
        for position in range(3, 6):
            text = "x" * (70_000 if lie == "text" else 1)
            top = 3 if lie == "top" else 0
            await head.token(
                "r1", position, text=text, top=top, logprob=math.nan if lie == "nan" else 0.0
            )
    async with failing(UnavailableError) as caught:
        async for _ in call:
            pass
    assert caught[0].reason == "WRONG_REPORT" and "node a" in caught[0].message
    assert await head.next_cancel() == "r1"


async def test_timings_of_more_stages_than_there_are_do_not_reach_the_client(site: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    await head.accept("r1")
    assert (await site.read(call)).started
    for position, stages in ((3, 3), (4, 4)):
        await head.token("r1", position, stages=stages)
        assert len((await site.read(call)).token.timings) == (3 if stages == 3 else 0)


async def test_a_prompt_is_not_longer_than_the_memory_for_it(site: Any, failing: Any) -> None:
    """If a deployment has no limit of the context."""
    _, head = await site.deployed()
    placement = site.state.deployments["tale"].placement
    positions = placement.kv_blocks * placement.kv_block_tokens
    generation = head_pb2.Generation(prompt="x" * positions, max_new_tokens=2)
    request = inference_pb2.GenerateRequest(model="tale", request_id="r1", generation=generation)
    call = site.inference.Generate(request, timeout=DEADLINE_S)
    await head.next_start()
    await head.accept("r1", prompt_tokens=range(positions + 1))
    async with failing(UnavailableError) as caught:
        await site.read(call)
    assert caught[0].reason == "WRONG_REPORT"


async def test_a_token_with_lists_beyond_any_request_ends_the_stream_of_its_head(site: Any) -> None:
    _, head = await site.deployed()
    site.generate("r1")
    await head.next_start()
    await head.accept("r1")
    await head.token("r1", 3, top=100_000)
    refused = await head.ended()
    assert isinstance(refused, InvalidArgumentError) and refused.field == "top"


async def test_a_failed_request_keeps_its_type(site: Any, failing: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    await head.fail(
        "r1", InvalidArgumentError("max_new_tokens: beyond the context", field="max_new_tokens")
    )
    async with failing(InvalidArgumentError) as caught:
        await site.read(call)
    assert caught[0].field == "max_new_tokens"


async def test_cancel_from_another_connection(site: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    await head.accept("r1")
    await head.token("r1", 3)
    other, _ = site.own_inference()
    answer = await other.Cancel(
        inference_pb2.InferenceServiceCancelRequest(request_id="r1"), timeout=DEADLINE_S
    )
    assert answer.cancelled
    assert await head.next_cancel() == "r1"
    await head.token("r1", 4)  # It was already in flight.
    await head.finish("r1", head_pb2.FINISH_REASON_CANCELLED)
    messages = [message async for message in call]
    assert messages[-1].finished.reason == head_pb2.FINISH_REASON_CANCELLED
    assert messages[-1].finished.new_token_count == 2
    again = await other.Cancel(
        inference_pb2.InferenceServiceCancelRequest(request_id="r1"), timeout=DEADLINE_S
    )
    assert not again.cancelled


@pytest.mark.parametrize("how", ["cancel", "close", "deadline"])
@pytest.mark.parametrize("when", ["queued", "running"])
async def test_a_client_that_leaves_stops_its_request(site: Any, how: str, when: str) -> None:
    _, head = await site.deployed()
    stub, channel = site.own_inference()
    request = inference_pb2.GenerateRequest(
        model="tale",
        request_id="r1",
        generation=head_pb2.Generation(prompt="once", max_new_tokens=8),
    )
    # Long enough for the preceding work on a machine that pauses.
    call = stub.Generate(request, timeout=5.0 if how == "deadline" else DEADLINE_S)
    await head.next_start()
    if when == "running":
        await head.accept("r1")
        await site.read(call)
    if how == "cancel":
        call.cancel()
    elif how == "close":
        await channel.close()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            while True:
                await call.read()
        assert isinstance(from_rpc_error(info.value), DeadlineError)
    assert await head.next_cancel() == "r1"
    assert site.coordinator.front.active_requests("tale") == 1, (
        "its place is free once the head says so"
    )
    await head.finish("r1", head_pb2.FINISH_REASON_CANCELLED)
    # The head's messages are read in order: once the next request starts to stream, the last one is
    # over.
    following = site.generate("r2")
    await head.next_start()
    await head.accept("r2")
    await site.read(following)
    assert site.coordinator.front.active_requests("tale") == 1
    following.cancel()


async def test_request_ids_are_unique_among_running_requests(site: Any, failing: Any) -> None:
    _, head = await site.deployed()
    first = site.generate("r1")
    await head.next_start()
    async with failing(AlreadyExistsError) as caught:
        await site.read(site.generate("r1"))
    assert caught[0].field == "request_id"
    await head.finish("r1")
    await site.read(first)
    again = site.generate("r1")
    await head.next_start()
    await head.finish("r1")
    await site.read(again)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt_tokens": [1]}, "prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2000, "clip_new_tokens": False}, "max_new_tokens"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
    ],
)
async def test_a_wrong_request_never_reaches_the_head(
    site: Any, failing: Any, changes: dict[str, Any], field: str
) -> None:
    _, head = await site.deployed(max_new_tokens=1024)
    generation = head_pb2.Generation(**{"prompt": "once", "max_new_tokens": 8, **changes})
    async with failing(InvalidArgumentError) as caught:
        await site.read(
            site.inference.Generate(
                inference_pb2.GenerateRequest(model="tale", generation=generation)
            )
        )
    assert caught[0].field == field
    assert head.down.empty()


async def test_models_are_found_by_deployment_or_model_name(site: Any, failing: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("r1", model="tiny")
    await head.next_start()
    await head.finish("r1")
    await site.read(call)
    async with failing(NotFoundError) as caught:
        await site.read(site.generate(model="nothing"))
    assert caught[0].field == "model" and "tale" in caught[0].message
    await site.admin.Deploy(site.deploy_request("op-2", name="tale-2"), timeout=DEADLINE_S)
    async with failing(InvalidArgumentError) as caught:
        await site.read(site.generate(model="tiny"))
    assert caught[0].field == "model" and "tale-2" in caught[0].message


async def test_overload_is_refused_at_once(site: Any, failing: Any) -> None:
    _, head = await site.deployed()
    calls = []
    for index in range(5):
        calls.append(site.generate(f"r{index}"))
        await head.next_start()
    async with failing(ResourceExhaustedError) as caught:
        await site.read(site.generate("r5"))
    assert caught[0].retry_after_s == 1.0 and caught[0].reason == "OVERLOADED"
    await head.finish("r0")
    await site.read(calls[0])
    last = site.generate("r5")
    assert (await head.next_start()).request_id == "r5"
    last.cancel()


async def test_a_slow_reader_blocks_nobody(open_site: Any, failing: Any) -> None:
    site = await open_site(backlog_limit=50)
    _, head = await site.deployed(max_new_tokens=1_000_000)
    slow = site.generate("slow", max_new_tokens=1_000_000)
    await head.next_start()
    fast_stub, _ = site.own_inference()
    generation = head_pb2.Generation(prompt="once", max_new_tokens=8)
    fast = fast_stub.Generate(
        inference_pb2.GenerateRequest(model="tale", request_id="fast", generation=generation),
        timeout=DEADLINE_S,
    )
    await head.next_start()
    await head.accept("slow")
    await head.accept("fast")
    await site.read(fast)
    # The slow client reads nothing: gRPC's own buffers fill, then the backlog, then it is given up.
    position, padding = 3, "\U0001f600" * 1024  # as long as the text of each token may be
    async with asyncio.timeout(DEADLINE_S):
        while head.down.empty():
            await head.token("slow", position, token=position, text=padding)
            position += 1
    assert await head.next_cancel() == "slow"
    await head.token("fast", 3)
    assert (await site.read(fast)).token.position == 3
    await head.finish("slow", head_pb2.FINISH_REASON_CANCELLED)
    async with failing(ResourceExhaustedError) as caught:
        expected = 3
        await site.read(slow)
        while True:
            token = (await site.read(slow)).token
            assert token.position == expected
            expected += 1
    assert caught[0].reason == "SLOW_READER"
    fast.cancel()


async def test_stopping_ends_requests_with_a_typed_error(
    open_site: Callable[..., Any], failing: Any
) -> None:
    site = await open_site()
    _, head = await site.deployed()
    call = site.generate("r1")
    await head.next_start()
    async with asyncio.timeout(20):
        await site.coordinator.stop()
    async with failing(UnavailableError):
        await site.read(call)


async def test_lengths_of_what_was_served_are_counted_and_outlive_the_deployment(site: Any) -> None:
    async def shown(outlook: bool = False) -> Any:
        request = admin_pb2.GetDeploymentRequest(name="tale", outlook=outlook)
        return (await site.admin.GetDeployment(request, timeout=DEADLINE_S)).deployment

    _, head = await site.deployed()
    unused = await shown(outlook=True)
    assert (
        unused.traffic.requests == 0
        and not unused.outlook.HasField("expected")
        and not unused.outlook.note
    )
    assert [loss.node for loss in unused.outlook.losses] == ["a", "b", "c"]
    waiting = site.generate("r0")
    await head.next_start()
    for request_id, count in (("r1", 2), ("r2", 0)):
        call = site.generate(request_id)
        await head.next_start()
        await head.accept(request_id)
        for index in range(count):
            await head.token(request_id, 3 + index, token=10 + index)
        await head.finish(request_id)
        while await call.read() is not grpc.aio.EOF:
            pass
    found = await shown()
    assert found.traffic.requests == 1, "a request without a token is none"
    assert (found.traffic.prompts.mean, found.traffic.answers.mean) == (
        3,
        2,
    ) and not found.HasField("outlook")
    assert found.traffic.at_once == 2, "r0 is there all the time"
    waiting.cancel()
    weighed = await shown(outlook=True)
    assert "not measured" in weighed.outlook.note and not weighed.outlook.HasField("expected")
    details = await site.admin.GetSite(admin_pb2.GetSiteRequest(model="tiny"), timeout=DEADLINE_S)
    assert details.traffic == found.traffic
    other = await site.admin.GetSite(admin_pb2.GetSiteRequest(), timeout=DEADLINE_S)
    assert other.traffic.requests == 0
    await site.restart()
    kept = site.coordinator.front.traffic.of(DeploymentName("tale"), ModelName("tiny"))
    assert traffic_to_wire(kept) == found.traffic
