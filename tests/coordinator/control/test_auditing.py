"""Every change of a site has an entry that names its author, and so has every refused caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.services.auditing import (
    MUTATIONS,
    NOTED,
    READS,
    TRAFFIC,
    CallAudit,
)
from edgeshard_coordinator.core.nodes import node_events

from edgeshard.domain.control.commands import ProbeLinks, ProfileReport
from edgeshard.domain.errors import (
    DeniedError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
)
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import NodeId
from edgeshard.process.clock import SystemClock
from edgeshard.proto.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from edgeshard.rpc.access import ENROLMENT, call_from
from edgeshard.wire.control import report_to_wire
from edgeshard.wire.site import audit_entry_from_wire
from tests.rpc.test_access import METHODS
from tests.support.identities import Identities
from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing


def test_every_method_is_declared() -> None:
    """Once, as what changes the site or as what does not."""
    tables = [*MUTATIONS, *NOTED, *READS, *TRAFFIC]
    assert sorted(tables) == sorted(METHODS)


@pytest.mark.parametrize("method", [*MUTATIONS, *NOTED])
def test_what_a_call_is_about_is_a_field_of_its_request(method: str) -> None:
    mutation, kind = {**MUTATIONS, **NOTED}[method], METHODS[method].input_type
    for name in filter(None, mutation.target.split(".")):
        kind = kind.fields_by_name[name].message_type or kind.fields_by_name[name]
    assert not mutation.target or kind.type == kind.TYPE_STRING


async def entries(site: Any, limit: int = 1000) -> list[Any]:
    answer = await site.admin.ListAudit(admin_pb2.ListAuditRequest(limit=limit), timeout=DEADLINE_S)
    return [audit_entry_from_wire(entry) for entry in answer.entries]


def said(found: list[Any]) -> list[tuple[str, str, str, str]]:
    return [(entry.who, entry.what, entry.target, entry.result) for entry in found]


@pytest.fixture
async def site(open_site: Callable[..., Any], tmp_path: Path) -> Any:
    return await open_site(identities=Identities(tmp_path))


ADMIN = "operator/admin"


async def test_what_an_operator_does_is_there_with_its_result(
    site: Any, failing: Any, tmp_path: Path
) -> None:
    _, head = await site.deployed()
    ours, _ = site.own_inference("app")
    request = inference_pb2.GenerateRequest(model="tale", request_id="r1")
    request.generation.prompt, request.generation.max_new_tokens = "the secret prompt", 8
    call = ours.Generate(request, timeout=DEADLINE_S)
    await head.next_start()
    await site.inference.Cancel(
        inference_pb2.InferenceServiceCancelRequest(request_id="r1"), timeout=DEADLINE_S
    )
    call.cancel()
    async with failing(InvalidArgumentError):
        request = site.deploy_request("op-2")
        request.spec.name = "../x"
        await site.admin.Deploy(request, timeout=DEADLINE_S)
    async with failing(NotFoundError):
        await site.admin.DeleteModel(
            admin_pb2.DeleteModelRequest(operation_id="o3", name="none"), timeout=DEADLINE_S
        )
    await site.admin.DeleteDeployment(
        admin_pb2.DeleteDeploymentRequest(operation_id="o4", name="tale"), timeout=DEADLINE_S
    )
    async with failing(NotFoundError):
        await site.admin.Replan(
            admin_pb2.ReplanRequest(operation_id="o5", name="none"), timeout=DEADLINE_S
        )
    async with failing(NotFoundError):
        await site.admin.Replan(
            admin_pb2.ReplanRequest(name="none", dry_run=True), timeout=DEADLINE_S
        )
    async for _ in site.admin.Dump(admin_pb2.DumpRequest(), timeout=DEADLINE_S):
        pass
    await site.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=DEADLINE_S)
    found = await entries(site)
    assert said(found) == [
        *((f"agent/{name}", "Register", name, "ok") for name in "abc"),
        (ADMIN, "Deploy", "tale", "ok"),
        (ADMIN, "Cancel", "r1 of client/app", "ok"),
        (ADMIN, "Deploy", "../x", "INVALID_NAME"),
        (ADMIN, "DeleteModel", "none", "NOT_FOUND"),
        (ADMIN, "DeleteDeployment", "tale", "ok"),
        (ADMIN, "Replan", "none", "NOT_FOUND"),
        (ADMIN, "Dump", "", "begun"),
        (ADMIN, "Dump", "", "ok"),
    ]
    assert all(entry.address.startswith("127.0.0.1:") for entry in found)
    assert said(await entries(site, limit=1)) == [(ADMIN, "Dump", "", "ok")]
    text = "".join(path.read_text() for path in (tmp_path / "audit").iterdir())
    assert "secret" not in text and len([json.loads(line) for line in text.splitlines()]) == len(
        found
    )


async def test_a_call_that_its_caller_left_says_so(site: Any) -> None:
    for agent in await site.connected("a", "b"):
        agent.held = {ProbeLinks}
    measuring = site.admin.Profile(admin_pb2.ProfileRequest(operation_id="p"), timeout=DEADLINE_S)
    await site.read(measuring)
    assert said(await entries(site))[-1] == (ADMIN, "Profile", "", "begun")
    measuring.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if said(await entries(site))[-1][3] != "begun":
                break
            await asyncio.sleep(0.01)
    assert said(await entries(site))[-1] == (ADMIN, "Profile", "", "CALLER_LEFT")


async def test_whoever_is_refused_is_there(site: Any, failing: Any) -> None:
    """By the table of roles, or because a node acts for another."""
    await site.connected("b")
    admin = admin_pb2_grpc.AdminServiceStub(site.channel_of(Role.CLIENT, "app"))
    async with failing(DeniedError):
        await admin.Deploy(site.deploy_request(), timeout=DEADLINE_S)
    async with failing(DeniedError):
        await admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=DEADLINE_S)
    async with failing(DeniedError):
        await site.agent("b", (Role.AGENT, "c")).register()
    async with failing(DeniedError):
        await site.agent("c").stub.ReportProfile(
            report_to_wire(ProfileReport(NodeId("id-b"))), timeout=DEADLINE_S
        )
    assert said(await entries(site)) == [
        ("agent/b", "Register", "b", "ok"),
        ("client/app", "Deploy", "tale", "ROLE"),
        ("client/app", "ListNodes", "", "ROLE"),
        ("agent/c", "Register", "b", "IMPERSONATION"),
        ("agent/c", "ReportProfile", "", "IMPERSONATION"),
    ]


async def test_only_operators_read_it_and_within_a_limit(site: Any, failing: Any) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(site.channel_of(Role.CLIENT, "app"))
    async with failing(DeniedError):
        await admin.ListAudit(admin_pb2.ListAuditRequest(limit=1), timeout=DEADLINE_S)
    for limit in (0, 1001):
        async with failing(InvalidArgumentError) as caught:
            await site.admin.ListAudit(admin_pb2.ListAuditRequest(limit=limit), timeout=DEADLINE_S)
        assert caught[0].field == "limit"


async def test_a_node_has_an_entry_when_it_is_new_or_another(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when it comes again, or its process is another."""
    monkeypatch.setattr(node_events, "LATE_S", -60.0)  # the first process counts as silent
    (agent,) = await site.connected("a")
    await agent.register()
    await site.agent("a", incarnation="i2").register()
    assert said(await entries(site)) == [("agent/a", "Register", "a", "ok")]
    await site.agent("a", incarnation="i2", address="elsewhere:7000").register()
    assert said(await entries(site)) == 2 * [("agent/a", "Register", "a", "ok")]


async def test_in_plaintext_the_address_is_who(open_site: Callable[..., Any]) -> None:
    site = await open_site()
    await site.deployed()
    found = (await entries(site))[-1]
    assert (
        found.who == found.address and found.who.startswith("127.0.0.1:") and found.what == "Deploy"
    )


class Shown:
    """A call's context whose caller showed this name, or none."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def auth_context(self) -> dict[str, list[bytes]]:
        return {
            "transport_security_type": [b"ssl"],
            "peer_uri": [self._uri.encode()] if self._uri else [],
        }

    def peer(self) -> str:
        return "ipv6:%5B::1%5D:5"


@pytest.mark.parametrize(
    ("uri", "reason", "who"),
    [
        ("edgeshard://site/client/app", "ROLE", "client/app"),
        ("edgeshard://other/operator/admin", "SITE", "edgeshard://other/operator/admin"),
        ("", "NO_ROLE", "nobody"),
    ],
)
async def test_a_stranger_is_not_taken_for_one_of_ours(
    tmp_path: Path, uri: str, reason: str, who: str
) -> None:
    log = AuditLog(tmp_path, SystemClock())
    log.start()
    request = SimpleNamespace(name="tale")
    refusal = DeniedError("no", reason=reason)
    CallAudit(log).ended(
        "/edgeshard.proto.v1.AdminService/DeleteModel",
        call_from(Shown(uri)),
        request,
        None,
        refusal,
    )
    (entry,) = await log.newest(10)
    await log.stop()
    assert (entry.who, entry.address, entry.target, entry.result) == (
        who,
        "[::1]:5",
        "tale",
        reason,
    )


async def test_who_has_no_certificate_is_no_operator(tmp_path: Path) -> None:
    """A client that tries tokens at full speed must not push out entries about operators."""
    log = AuditLog(tmp_path, SystemClock())
    log.start()
    request = SimpleNamespace(token_id="t1")
    wrong = UnauthenticatedError("no such token", reason="TOKEN")
    CallAudit(log).ended(ENROLMENT, call_from(Shown("")), request, None, wrong)
    (entry,) = await log.newest(10)
    await log.stop()
    assert (entry.who, entry.target, entry.result) == ("[::1]:5", "t1", "TOKEN")
    assert [path.name for path in tmp_path.iterdir()] == ["refusals.jsonl"]


async def test_a_model_has_one_entry_when_all_of_it_is_there(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, SystemClock())
    log.start()
    method = "/edgeshard.proto.v1.ModelStoreService/RegisterModel"
    source = call_from(Shown("edgeshard://site/operator/admin"))
    request = SimpleNamespace(manifest=SimpleNamespace(name="tiny"))
    for registered in (False, True):
        CallAudit(log).ended(method, source, request, SimpleNamespace(registered=registered), None)
    CallAudit(log).ended(method, source, request, None, InvalidArgumentError("no", reason="BAD"))
    found = await log.newest(10)
    await log.stop()
    assert said(list(found)) == [
        (ADMIN, "RegisterModel", "tiny", "ok"),
        (ADMIN, "RegisterModel", "tiny", "BAD"),
    ]


async def test_what_a_full_disk_loses_is_told_of_and_nothing_else_happens(
    site: Any, failing: Any, tmp_path: Path
) -> None:
    (tmp_path / "audit").write_text("in the way")
    await site.deployed()
    async with failing(InternalError):
        await entries(site)  # All that came before was tried.
    (tmp_path / "audit").unlink()
    await site.admin.DeleteDeployment(
        admin_pb2.DeleteDeploymentRequest(operation_id="o", name="tale"), timeout=DEADLINE_S
    )
    (entry,) = await entries(site)
    assert (entry.what, entry.suppressed) == ("DeleteDeployment", 4)


async def test_a_mutation_answers_no_sooner_than_its_entry_is_under_way(site: Any) -> None:
    """A caller that reads directly after it finds it."""
    await site.deployed()
    for number in range(20):
        with pytest.raises(grpc.aio.AioRpcError):
            await site.admin.DeleteModel(
                admin_pb2.DeleteModelRequest(operation_id=f"o{number}", name=f"m{number}"),
                timeout=DEADLINE_S,
            )
        assert (await entries(site, limit=1))[0].target == f"m{number}"
