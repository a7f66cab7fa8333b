"""The picture of a real coordinator: what did not change is the same object, so that nothing is
made or sent of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from edgeshard_coordinator.dashboard.camera import Camera
from edgeshard_coordinator.dashboard.feed import difference

from tests.support.scripted_agent import DEADLINE_S

pytestmark = pytest.mark.timing


async def test_parts_that_did_not_change_are_the_same_objects(site: Any) -> None:
    agents, _ = await site.deployed()
    camera = Camera(site.coordinator)
    first = camera.take()
    assert set(first["nodes"]) == {"a", "b", "c"} and first["models"] and first["events"]
    second = camera.take()
    for part in ("site", "links", "models", "events"):
        assert second[part] is first[part], part
    assert difference(first, second) == {}
    await agents[1].vanish()
    await site.until_phase("tale", "waiting")
    third = camera.take()
    assert third["models"] is first["models"] and third["events"] is not first["events"]
    assert third["nodes"]["b"]["status"] == "away" and len(third["events"]) > len(first["events"])


async def test_a_request_is_in_the_picture_while_it_runs(site: Any) -> None:
    _, head = await site.deployed()
    camera = Camera(site.coordinator)
    assert camera.take()["requests"] == {}
    call = site.generate("r1", max_new_tokens=5)
    await head.next_start()
    found = camera.take()["requests"]["r1"]
    assert (found["deployment"], found["state"], found["new"], found["limit"]) == (
        "tale",
        "queued",
        0,
        5,
    )
    await head.accept("r1", prompt_tokens=range(9))
    await head.admit("r1")
    for read in (4, 8):
        await head.admit("r1", read)
        async with asyncio.timeout(DEADLINE_S):
            while camera.take()["requests"]["r1"].get("read") != read:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.005)
    assert camera.take()["requests"]["r1"]["state"] == "reading"
    await head.token("r1", 9)
    await site.read(call)
    await site.read(call)
    found = camera.take()["requests"]["r1"]
    assert (found["state"], found["read"], found["prompt"], found["new"]) == ("writing", 9, 9, 1)
    call.cancel()
