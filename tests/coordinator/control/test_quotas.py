"""The limits of one identity's use of a site, applied to callers with certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.requests.quotas import QuotaBook
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.running_request import RunningRequest
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    ResourceExhaustedError,
)
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import FinishReason, Generation, Token
from edgeshard.domain.requests.head import RequestAccepted, RequestEnd, RequestEvent
from edgeshard.proto.v1 import head_pb2, inference_pb2
from edgeshard.wire.status import from_rpc_error
from tests.attack import resumption
from tests.support.heads import say
from tests.support.identities import Identities
from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing

NAME = DeploymentName("tale")
HEAD = NodeId("id-a"), NodeName("a")
ONCE = Generation("once")
RECORD = DeploymentRecord(
    uid="u1",
    spec=parse_spec({"name": "tale", "model": "tiny", "source": "a", "concurrency": 4}),
    manifest_digest=Digest("d" * 64),
    placement=Placement(
        (PlacedStage(0, *HEAD, "a:7000", LayerRange(0, 6), 1000, 1000),), 16, 8, 1, 1
    ),
    epoch=Epoch(3),
    phase=DeploymentPhase.READY,
)


class Front:
    """A front with two ready deployments of four slots each, so that twenty requests find a place
    at each."""

    def __init__(self, **quotas: Quota) -> None:
        self.now = 0.0
        others = quotas.pop("others", Quota())
        named = {name.replace("_", "/"): quota for name, quota in quotas.items()}
        self.front = RequestFront(
            self.state, TrafficBook(), lambda: self.now, quotas=Quotas(named, others)
        )
        self.heads = {
            name: self.front.attach(name, Epoch(3), *HEAD)
            for name in (NAME, DeploymentName("other"))
        }
        self.count = 0

    def state(self) -> State:
        other = replace(RECORD, spec=replace(RECORD.spec, name="other"))
        return State(instance="test", deployments={NAME: RECORD, DeploymentName("other"): other})

    def start(self, client: str, model: str = NAME, **more: Any) -> RunningRequest:
        self.count += 1
        id = RequestId(more.pop("id", f"r{self.count}"))
        return self.front.start(model, more.pop("generation", ONCE), id, client, **more)

    def run(
        self,
        request: RunningRequest,
        prompt_tokens: int,
        new_tokens: int,
        *,
        to_its_end: bool = True,
    ) -> None:
        tokens = [
            Token(position, 7, "") for position in range(prompt_tokens, prompt_tokens + new_tokens)
        ]
        self.heard(request, RequestAccepted((7,) * prompt_tokens), *tokens)
        if to_its_end:
            self.heard(request, RequestEnd(FinishReason.LENGTH, ""))

    def heard(self, request: RunningRequest, *events: RequestEvent) -> None:
        say(self.front, self.heads[request.deployment], request.request_id, *events)

    def refused(self, client: str, model: str = NAME, **more: Any) -> ResourceExhaustedError:
        with pytest.raises(ResourceExhaustedError) as refusal:
            self.start(client, model, **more)
        return refusal.value


def generate(stub: Any, request_id: str, priority: int = 0, resume: bool = False) -> Any:
    generation = head_pb2.Generation(prompt="once", max_new_tokens=8, priority=priority)
    request = inference_pb2.GenerateRequest(
        model="tale", request_id=request_id, generation=generation
    )
    if resume:
        request.resume.SetInParent()
    return stub.Generate(request, timeout=DEADLINE_S)


async def test_one_client_cannot_keep_all_others_out(
    open_site: Callable[..., Any], tmp_path: Path
) -> None:
    """Forty calls for twenty places: the client gets twelve, all four slots and half of the
    queue."""
    site = await open_site(identities=Identities(tmp_path))
    _, head = await site.deployed(concurrency=4)
    greedy, _ = site.own_inference("greedy")
    calls = [generate(greedy, f"g{number}") for number in range(40)]
    admitted = {(await head.next_start()).request_id for _ in range(12)}

    async def refusal(call: Any) -> EdgeShardError:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call.read(), DEADLINE_S)
        return from_rpc_error(refused.value)

    refused = [call for number, call in enumerate(calls) if f"g{number}" not in admitted]
    assert len(refused) == 28
    for error in [await refusal(call) for call in refused]:
        assert (
            isinstance(error, ResourceExhaustedError)
            and error.reason == "QUOTA"
            and error.retry_after_s == 1.0
        )
        assert "client/greedy" in error.message and "requests" in error.message
    modest, _ = site.own_inference("modest")
    generate(modest, "m")
    assert (await head.next_start()).request_id == "m"
    # Claiming an earlier admission does not give it more.
    error = await refusal(generate(greedy, "g-again", resume=True))
    assert isinstance(error, FailedPreconditionError) and (error.field, error.reason) == (
        "resume",
        "NOT_RESUMABLE",
    )


async def test_requests_that_ended_do_not_come_back_as_more_than_one_client_may_have(
    open_site: Callable[..., Any], tmp_path: Path
) -> None:
    """Nor as others, nor at a priority of their own."""
    identities = Identities(tmp_path)
    site = await open_site(identities=identities)
    _, head = await site.deployed(concurrency=4)

    async def serve() -> None:
        """The first time each ends at once; resumed requests continue."""
        while True:
            start = await head.next_start()
            await head.accept(start.request_id)
            if not start.resumed:
                await head.token(start.request_id, 3)
                await head.finish(start.request_id)

    served = asyncio.create_task(serve())
    files = identities.of(Role.CLIENT, "mallory")
    found = await resumption.resume_ended(site.address, files, "tale", count=40, seconds=DEADLINE_S)
    served.cancel()
    assert found["others"] == found["never"] == {"NOT_RESUMABLE": 40}
    assert found["same"] == {resumption.STARTED: 12, "QUOTA": 28}


async def test_a_client_asks_for_no_priority_that_it_was_not_given(
    open_site: Callable[..., Any], tmp_path: Path, failing: Any
) -> None:
    site = await open_site(identities=Identities(tmp_path))
    _, head = await site.deployed(concurrency=4)
    client, _ = site.own_inference("app")
    async with failing(DeniedError) as caught:
        await site.read(generate(client, "r1", priority=1))
    assert caught[0].field == "priority" and "client/app" in caught[0].message
    generate(client, "r2", priority=0)
    assert (await head.next_start()).request_id == "r2"
    generate(site.inference, "r3", priority=10)
    assert (await head.next_start()).request_id == "r3", "an operator may"


def test_a_share_is_of_each_deployment_and_frees_with_its_requests() -> None:
    site = Front()
    requests = [site.start("client/app") for _ in range(12)]
    assert site.refused("client/app").field == "requests"
    site.start("client/app", "other")
    site.start("operator/admin")
    site.run(requests[0], 1, 1)
    site.start("client/app")
    assert "at deployment tale" in site.refused("client/app").message


def test_a_quota_of_requests_takes_the_place_of_the_share() -> None:
    site = Front(
        client_app=Quota(requests=20), client_small=Quota(requests=2), others=Quota(requests=15)
    )
    for model in (NAME, "other"):
        site.start("client/small", model)
    assert "2 requests" in site.refused("client/small").message, "wherever they are"
    for _ in range(19):
        site.start("client/app")
    assert site.refused("client/other").reason == "OVERLOADED"
    site.start("client/app", "other")
    assert site.refused("client/app", "other").reason == "QUOTA"


def test_tokens_are_counted_as_they_come_and_a_debt_is_waited_for() -> None:
    """60 a minute is one a second, and a minute's worth at once."""
    site = Front(client_app=Quota(tokens_per_minute=60))
    first = site.start("client/app")
    site.run(first, prompt_tokens=50, new_tokens=10, to_its_end=False)
    second = site.start("client/app")
    site.run(second, prompt_tokens=3, new_tokens=0, to_its_end=False)
    error = site.refused("client/app")
    assert (error.reason, error.field, error.retry_after_s) == ("QUOTA", "tokens_per_minute", 3.0)
    assert "60 tokens_per_minute" in error.message and "client/app" in error.message
    site.start("client/other")
    site.heard(second, Token(3, 7, ""))
    assert second.emitted == [7], "what runs goes on"
    site.now = 3.5
    assert site.refused("client/app").retry_after_s == 0.5
    site.now = 4.0
    site.start("client/app")


def test_in_plaintext_everyone_has_the_quota_of_everyone_else_and_no_share() -> None:
    site = Front()
    for _ in range(20):
        site.start("", generation=Generation("once", priority=10))
    assert site.refused("").reason == "OVERLOADED"
    site = Front(others=Quota(requests=3, tokens_per_minute=60))
    requests = [site.start("") for _ in range(3)]
    assert "everyone together" in site.refused("").message
    site.run(requests[0], 62, 0)
    assert site.refused("").retry_after_s == 2.0


def test_a_request_that_was_let_in_passes_its_identitys_debt_when_its_client_is_back() -> None:
    """Nor is its prompt counted again, only the tokens that are new."""
    site = Front(client_app=Quota(requests=1, tokens_per_minute=60))
    request = site.start("client/app", id="mine")
    site.run(request, prompt_tokens=100, new_tokens=2, to_its_end=False)
    assert site.refused("client/app").field == "requests"
    back = site.start("client/app", id="mine", emitted=(7, 7))
    site.heard(back, RequestAccepted((7,) * 100))
    site.front.abandon(back)
    site.heard(back, RequestEnd(FinishReason.CANCELLED, ""))
    assert site.refused("client/app").retry_after_s == 42.0, "102 less the 60 of a minute"
    site.start("client/app", id="mine", emitted=(7, 7))


def test_whoever_comes_back_before_its_prompt_was_counted_has_it_counted() -> None:
    site = Front(client_app=Quota(tokens_per_minute=60))
    site.start("client/app", id="mine")
    back = site.start("client/app", id="mine", emitted=())
    site.run(back, prompt_tokens=100, new_tokens=0, to_its_end=False)
    assert site.refused("client/app").retry_after_s == 40.0


def test_what_is_remembered_is_bounded() -> None:
    now = [0.0]
    book = QuotaBook(Quotas(others=Quota(tokens_per_minute=60)), lambda: now[0])
    for number in range(100):
        book.charge(f"client/c{number}", 30)
        now[0] += 1.0
    assert len(book._buckets) <= 31, "a bucket that is full is forgotten"


async def test_what_a_certificate_says_is_who_is_held_to_a_quota(
    open_site: Callable[..., Any], tmp_path: Path, failing: Any
) -> None:
    quotas = Quotas({"client/app": Quota(requests=1)})
    site = await open_site(identities=Identities(tmp_path), quotas=quotas)
    _, head = await site.deployed(concurrency=4)
    client, _ = site.own_inference("app")
    generate(client, "r1")
    await head.next_start()
    again, _ = site.own_inference("app")
    async with failing(ResourceExhaustedError) as caught:
        await site.read(generate(again, "r2"))
    assert caught[0].reason == "QUOTA" and "client/app" in caught[0].message, (
        "over another connection, too"
    )
    operator = site.channel_of(Role.OPERATOR, "app")
    generate(type(client)(operator), "r3")
    assert (await head.next_start()).request_id == "r3"
