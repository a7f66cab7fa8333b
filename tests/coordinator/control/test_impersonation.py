"""If it has a certificate, a process acts only for itself, whatever name it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeshard.domain.control.commands import ControlHello, ProfileReport
from edgeshard.domain.errors import AlreadyExistsError, DeniedError
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import NodeId
from edgeshard.proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    coordinator_pb2,
    head_pb2,
    head_pb2_grpc,
    inference_pb2,
)
from edgeshard.wire.control import agent_message_to_wire, report_to_wire
from tests.support.identities import Identities, is_denied
from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing

OTHERS = [(Role.AGENT, "c"), (Role.CLIENT, "app"), (Role.OPERATOR, "admin")]


@pytest.fixture
async def site(open_site: Callable[..., Any], tmp_path: Path) -> Any:
    return await open_site(identities=Identities(tmp_path))


@pytest.mark.parametrize("holder", OTHERS, ids=str)
async def test_nobody_registers_as_another_node(
    site: Any, failing: Any, holder: tuple[Role, str]
) -> None:
    """Otherwise the impostor would get that node's activations."""
    await site.connected("b")
    forged = site.agent("b", holder, incarnation="i2")
    async with failing(DeniedError):
        await forged.register()
    assert site.state.nodes["id-b"].incarnation == "i1" and site.state.is_connected("id-b")


async def test_no_node_takes_the_id_of_another(site: Any, failing: Any) -> None:
    """By its own name, which its certificate bears out."""
    await site.connected("b")
    forged = site.agent("c", node_id="id-b")
    async with failing(DeniedError):
        await forged.register()
    assert site.state.nodes["id-b"].name == "b"


@pytest.mark.parametrize("holder", OTHERS, ids=str)
async def test_nobody_opens_the_control_stream_of_another_node(
    site: Any, failing: Any, holder: tuple[Role, str]
) -> None:
    (real,) = await site.connected("b")
    call = site.agent("b", holder).stub.Control()
    assert await is_denied(call, agent_message_to_wire(ControlHello(real.node_id, "i1")))
    await site.heard(real)


async def test_nobody_reports_or_heartbeats_for_another_node(site: Any, failing: Any) -> None:
    await site.connected("b")
    stub = site.agent("c").stub
    async with failing(DeniedError):
        await stub.ReportProfile(report_to_wire(ProfileReport(NodeId("id-b"))), timeout=DEADLINE_S)
    async with failing(DeniedError):
        request = coordinator_pb2.HeartbeatRequest(node_id="id-b", incarnation="i1")
        await stub.Heartbeat(request, timeout=DEADLINE_S)


@pytest.mark.parametrize("holder", [(Role.AGENT, "b"), *OTHERS], ids=str)
async def test_nobody_but_its_node_attaches_a_head(site: Any, holder: tuple[Role, str]) -> None:
    """An application that did was given another user's prompt, and answered it."""
    agents, head = await site.deployed()
    hello = head_pb2.HeadHello(node_id=agents[0].node_id, deployment="tale", epoch=head.epoch)
    forged = head_pb2_grpc.HeadServiceStub(site.channel_of(*holder)).Attach()
    assert await is_denied(forged, head_pb2.AttachRequest(hello=hello))
    call = site.generate("r")
    assert (await head.down.get()).start.request_id == "r"
    call.cancel()


async def test_a_request_is_its_owners(site: Any, failing: Any) -> None:
    """Other clients cannot cancel it or take over its stream; an operator may cancel any."""
    _, head = await site.deployed()
    ours, _ = site.own_inference("ours")
    theirs, _ = site.own_inference("theirs")
    request = inference_pb2.GenerateRequest(model="tale", request_id="r")
    request.generation.prompt, request.generation.max_new_tokens = "once", 8
    call = ours.Generate(request, timeout=DEADLINE_S)
    assert (await head.down.get()).start.request_id == "r"
    cancel = inference_pb2.InferenceServiceCancelRequest(request_id="r")
    assert not (await theirs.Cancel(cancel, timeout=DEADLINE_S)).cancelled
    request.resume.tokens.extend(())
    request.resume.SetInParent()
    async with failing(AlreadyExistsError):
        await theirs.Generate(request, timeout=DEADLINE_S).read()
    assert not call.done()
    assert (await site.inference.Cancel(cancel, timeout=DEADLINE_S)).cancelled


async def test_an_application_cannot_administrate(site: Any, failing: Any) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(site.channel_of(Role.CLIENT, "app"))
    async with failing(DeniedError):
        await admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=DEADLINE_S)
    async with failing(DeniedError):
        await admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    assert not site.state.deployments
