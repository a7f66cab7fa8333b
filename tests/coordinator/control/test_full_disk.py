"""A disk that refuses: the call fails at once and has changed nothing, and works when there is
space."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence import operations

from edgeshard.domain.errors import DeadlineError, InternalError
from edgeshard.proto.v1 import admin_pb2 as pb
from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing

MOST_S = 5.0


@contextmanager
def refusing(state_path: Path) -> Iterator[None]:
    """The state's log, which receives every write, cannot grow."""
    log = state_path.with_name(state_path.name + "-wal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_deployment_that_cannot_be_saved_is_refused_and_works_when_there_is_room(
    site: Any, failing: Any
) -> None:
    agents = await site.connected("a", "b", "c")
    request = site.deploy_request(operation_id="op-deploy")
    began = time.monotonic()
    with refusing(site.state_path):
        async with failing(InternalError) as caught:
            await site.admin.Deploy(request, timeout=DEADLINE_S)
    assert time.monotonic() - began < MOST_S
    assert caught[0].reason == "STATE_STORE" and caught[0].field == "state-dir"
    assert not site.state.deployments and not any(agent.commands for agent in agents)
    await site.admin.Deploy(request, timeout=DEADLINE_S)
    await site.until_phase("tale", "ready")


async def test_a_deletion_that_cannot_be_saved_leaves_the_deployment_at_work(
    site: Any, failing: Any
) -> None:
    _, head = await site.deployed()
    running = site.generate("r1")
    await head.accept((await head.next_start()).request_id)
    assert (await site.read(running)).HasField("started")
    request = pb.DeleteDeploymentRequest(operation_id="op-delete", name="tale")
    began = time.monotonic()
    with refusing(site.state_path):
        async with failing(InternalError):
            await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    assert time.monotonic() - began < MOST_S
    assert site.state.deployments["tale"].phase == "ready"
    await head.token("r1", 3, 7)
    assert (await site.read(running)).token.token == 7, "its requests go on"
    await site.admin.DeleteDeployment(request, timeout=DEADLINE_S)
    await site.until(lambda state: "tale" not in state.deployments)
    await site.restart()
    assert not site.state.deployments


async def test_a_disk_that_says_nothing_is_not_waited_for_and_the_call_can_be_made_again(
    site: Any, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.connected("a", "b", "c")
    request = site.deploy_request(operation_id="op-deploy")
    monkeypatch.setattr(operations, "DISK_LIMIT_S", 2.0)
    store, go_on = site.coordinator._store, threading.Event()
    save = store.save

    async def wait_and_save(record: Any) -> None:
        assert await store._run(lambda: go_on.wait(DEADLINE_S))
        await save(record)

    monkeypatch.setattr(store, "save", wait_and_save)
    try:
        async with failing(DeadlineError) as caught:
            await site.admin.Deploy(request, timeout=DEADLINE_S)
        assert caught[0].reason == "NOT_SAVED_YET"
        uid = site.state.deployments["tale"].uid
    finally:
        go_on.set()
    monkeypatch.setattr(operations, "DISK_LIMIT_S", DEADLINE_S)
    answers = await asyncio.gather(
        *(site.admin.Deploy(request, timeout=DEADLINE_S) for _ in range(2))
    )
    assert [answer.deployment.epoch for answer in answers] == [1, 1]
    assert (await site.until_phase("tale", "ready")).uid == uid
