"""A call that is lost, whose answer is lost, or that is sent twice takes effect once, on a real
coordinator and nodes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Unpack

import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import AlreadyExistsError, NotFoundError, UnavailableError
from edgeshard.domain.requests.generation import Finished, FinishReason, GenerateOptions, Token
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1.admin_pb2_grpc import AdminServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.wire.site import deployment_from_wire, spec_to_wire
from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.sending import sent
from tests.chaos.site import DEMO_MODEL, DEPLOYMENT, MODEL, ChaosSite, spec
from tests.support.checker import check
from tests.support.load import Stream, whole_answer
from tests.support.site import COORDINATOR

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
LOST = [Action.LOSE_REQUEST, Action.LOSE_REPLY]
FAULTS = [*LOST, Action.TWICE]
PROMPT = tuple(range(3, 35))
ASKED = GenerateOptions(max_new_tokens=24, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosSite]:
    async with ChaosSite(tmp_path_factory.mktemp("site"), ("a", "b", "c")) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tales(site: ChaosSite) -> None:
    """Deployed once for the tests that only ask it for text."""
    await site.deploy()


class Faulty:
    """The next call of a method suffers a fault; at the end it must have happened."""

    def __init__(self, site: ChaosSite, method: str, action: Action) -> None:
        self._site = site
        self._point = Failpoint(uuid.uuid4().hex, Place.CALL, what=method, action=action)

    async def __aenter__(self) -> None:
        self._site.arm(COORDINATOR, [self._point])

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            assert self._point.id in self._site.marks(), f"nobody called {self._point.what}"


def logged(site: ChaosSite, event: str, **fields: object) -> int:
    """How often the coordinator has logged this."""
    lines = [
        json.loads(line) for line in site.daemons[COORDINATOR].log_path.read_text().splitlines()
    ]
    return sum(line.get("event") == event and fields.items() <= line.items() for line in lines)


def asked(**options: Unpack[GenerateOptions]) -> Stream:
    return Stream(DEPLOYMENT, PROMPT, ASKED | options)


async def gone(site: ChaosSite) -> bool:
    return not await site.client.deployments()


@pytest.mark.parametrize("action", FAULTS)
async def test_a_deployment_is_made_once(site: ChaosSite, action: Action) -> None:
    name = f"once-{action.value.replace('_', '-')}"
    async with Faulty(site, "Deploy", action):
        made = await site.client.deploy(spec(name=name), timeout_s=60)
    assert (made.phase, made.epoch) == (DeploymentPhase.READY, 1)
    assert logged(site, "command_sent", kind="PrepareStage", deployment=name) == 3, (
        "one for each stage"
    )
    with pytest.raises(AlreadyExistsError):
        await site.client.deploy(spec(name=name))
    await site.client.delete_deployment(name)
    await site.until(lambda: gone(site))


@pytest.mark.parametrize("action", FAULTS)
async def test_a_deployment_is_deleted_once(site: ChaosSite, action: Action) -> None:
    name = f"gone-{action.value.replace('_', '-')}"
    await site.client.deploy(spec(name=name), timeout_s=60)
    async with Faulty(site, "DeleteDeployment", action):
        await site.client.delete_deployment(name)
    await site.until(lambda: gone(site))
    assert logged(site, "command_sent", kind="ReleaseStage", deployment=name) == 3
    assert logged(site, "deployment_removed", deployment=name) == 1
    with pytest.raises(NotFoundError):
        await site.client.delete_deployment(name)
    again = await site.client.deploy(spec(name=name), wait=False)
    assert again.epoch == 2, "the deletion used up an epoch"
    await site.client.delete_deployment(name)
    await site.until(lambda: gone(site))


async def test_a_deployment_whose_coordinator_is_killed_before_it_answers_is_not_made_twice(
    site: ChaosSite,
) -> None:
    """Killed after the write: the same call, sent to the next coordinator, gets the first
    answer."""
    request = admin_pb2.DeployRequest(
        operation_id=uuid.uuid4().hex, spec=spec_to_wire(spec(name="killed"))
    )
    site.arm(COORDINATOR, [Failpoint("killed-after-save", Place.AFTER_SAVE, what="new->loading")])

    async def ask() -> Any:
        async with open_channel(site.address, None) as channel:
            return deployment_from_wire(
                (await AdminServiceStub(channel).Deploy(request, timeout=20)).deployment
            )

    first = asyncio.create_task(ask())
    await site.daemons[COORDINATOR].exited()
    await site.start_daemon(COORDINATOR)
    await asyncio.gather(first, return_exceptions=True)  # gRPC itself may have repeated it, or not
    assert (await ask()).epoch == 1
    await site.restore()
    (made,) = await site.client.deployments()
    assert (made.spec.name, made.phase) == ("killed", DeploymentPhase.READY)
    await site.client.delete_deployment("killed")
    await site.until(lambda: gone(site))


@pytest.mark.parametrize("action", FAULTS)
@pytest.mark.parametrize("method", ["RegisterModel", "PutBlob"])
async def test_a_model_is_added_once(
    site: ChaosSite, tmp_path: Path, method: str, action: Action
) -> None:
    """PutBlob twice is two clients that send the same model at once."""
    other = copied_model(tmp_path, f"{method} {action}")
    if (method, action) == ("PutBlob", Action.TWICE):
        async with Client(site.address, plaintext=True) as second:
            digests = await asyncio.gather(
                *(sent(c, other, "again") for c in (site.client, second))
            )
    else:
        async with Faulty(site, method, action):
            digests = [await sent(site.client, other, "again")]
    digests.append(await sent(site.client, other, "again"))
    assert len(set(digests)) == 1
    assert [model.name for model in await site.client.stored_models()] == ["again", MODEL]
    await site.client.delete_model("again")


@pytest.mark.parametrize("action", FAULTS)
async def test_a_model_is_deleted_once(site: ChaosSite, tmp_path: Path, action: Action) -> None:
    await sent(site.client, copied_model(tmp_path, "to delete"), "again")
    async with Faulty(site, "DeleteModel", action):
        await site.client.delete_model("again")
    assert [model.name for model in await site.client.stored_models()] == [MODEL]
    with pytest.raises(NotFoundError):
        await site.client.delete_model("again")


@pytest.mark.parametrize("action", FAULTS)
async def test_a_node_registers_once(site: ChaosSite, action: Action) -> None:
    before = {node.name: node.node_id for node in await site.client.nodes()}
    await site.daemons["c"].kill()
    async with Faulty(site, "Register", action):
        await site.start_daemon("c")
    nodes = await site.client.nodes()
    assert {node.name: node.node_id for node in nodes} == before and len(nodes) == 3
    assert all(node.connected and not node.starting for node in nodes)


@pytest.mark.parametrize("action", FAULTS)
async def test_a_measurement_is_reported_once(site: ChaosSite, action: Action) -> None:
    async with Faulty(site, "ReportProfile", action):
        progress = [event async for event in site.client.profile(nodes=("b",))]
    assert progress[-1].finished and progress[-1].failure is None
    names = {node.node_id: node.name for node in await site.client.nodes()}
    links = [stored.link for stored in (await site.client.node_details("b")).links]
    ways = [(names[link.sender], names[link.receiver]) for link in links]
    assert sorted(way for way in ways if way[0] == "b") == [("b", "a"), ("b", "c")]


@pytest.mark.parametrize("action", LOST)
async def test_a_request_whose_call_is_lost_ends_right_or_never_began(
    site: ChaosSite, tales: None, action: Action
) -> None:
    """A client that has a beginning reconnects for the rest by itself. The same id is free for
    another afterwards."""
    right = await whole_answer(site.client, asked(max_new_tokens=96))
    lost = asked(max_new_tokens=96, request_id="lost")
    async with Faulty(site, "Generate", action):
        await lost.run(site.client)
    assert lost.error is None or isinstance(lost.error, UnavailableError)
    assert check(lost.events, right, whole=bool(lost.events)).problems == ()
    again = await whole_answer(site.client, asked(max_new_tokens=96, request_id="lost"))
    assert again == right


async def test_a_request_that_comes_twice_runs_once(site: ChaosSite, tales: None) -> None:
    right = await whole_answer(site.client, asked())
    streams = [asked(request_id="two") for _ in range(2)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(stream.run(site.client) for stream in streams))
    (refused,) = [stream.error for stream in streams if stream.error is not None]
    assert isinstance(refused, AlreadyExistsError) and refused.field == "request_id"
    (whole,) = [stream for stream in streams if stream.error is None]
    assert check(whole.events, right).problems == ()


@pytest.mark.parametrize("action", FAULTS)
async def test_a_request_is_cancelled_once(site: ChaosSite, tales: None, action: Action) -> None:
    """A cancel that may be lost is sent again: that does no harm, and completes the cancellation if
    the first was lost.
    """
    stream = site.client.generate(
        DEPLOYMENT, PROMPT, request_id="away", max_new_tokens=96, ignore_eos=True
    )
    events = [await anext(stream)]
    async with Faulty(site, "Cancel", action):
        try:
            await site.client.cancel("away")
        except UnavailableError:
            await site.client.cancel("away")
    events += [event async for event in stream]
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.reason for end in ends] in ([FinishReason.CANCELLED], [FinishReason.LENGTH])
    positions = [event.position for event in events if isinstance(event, Token)]
    assert positions == list(range(len(PROMPT), len(PROMPT) + len(positions)))
    assert not await site.client.cancel("away")


def copied_model(directory: Path, mark: str) -> Path:
    """The demo model with a small file of its own, so that there is something to send."""
    path = directory / "model"
    shutil.copytree(DEMO_MODEL, path)
    generation = path / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "mark": mark}))
    return path
