"""The client's view of a site's nodes: profiles, links, and the progress of a measurement."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from edgeshard import Client, SyncClient
from edgeshard.client import NodeProgress
from edgeshard.domain.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.models.dtypes import DType
from edgeshard.proto.v1 import admin_pb2


async def test_a_site_is_nodes_links_profiles_and_the_models_config(site: Any) -> None:
    site.measured(a=1e-3, b=5e-4)
    async with Client(site.address) as client:
        whole, bare = await client.site("fairy-tales"), await client.site()
    assert [node.name for node in whole.nodes] == ["a", "b"] and whole.config[
        "num_hidden_layers"
    ] == 12
    assert [(stored.node_id, stored.models, stored.age_s) for stored in whole.profiles] == [
        ("id-a", ("fairy-tales",), 3600),
        ("id-b", ("fairy-tales",), 3600),
    ]
    assert whole.profiles[0].profile == site.compute_profile(1e-3)
    assert [(stored.link.sender, stored.link.receiver, stored.age_s) for stored in whole.links] == [
        ("id-a", "id-b", 130),
        ("id-b", "id-a", 130),
    ]
    assert (bare.profiles, bare.config, bare.links) == ((), {}, whole.links)


async def test_a_node_comes_with_its_own_profiles_and_the_links_of_both_directions(
    site: Any,
) -> None:
    site.measured(a=1e-3, b=5e-4)
    async with Client(site.address) as client:
        details = await client.node_details("id-b")
    assert details.node.name == "b"
    assert [stored.profile for stored in details.profiles] == [site.compute_profile(5e-4)]
    assert len(details.links) == 2


async def test_figures_that_cannot_be_are_refused_by_name(site: Any) -> None:
    site.measured(a=1e-3)
    site.links[0].profile.bandwidth_bps = 0
    async with Client(site.address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.site("fairy-tales")
    assert caught.value.field == "links.profile.bandwidth_bps"


async def test_a_config_that_is_not_an_object_is_the_coordinators_fault(site: Any) -> None:
    site.config = [1]
    async with Client(site.address) as client:
        with pytest.raises(InternalError, match="config_json"):
            await client.site("fairy-tales")


async def test_profiling_tells_how_far_every_node_is_and_which_failed(site: Any) -> None:
    failure = UnavailableError("node b is away", field="b", reason="NODE_AWAY")
    site.progress = [
        site.told("a", 3, "block: 64 tokens"),
        site.told("b", 0, "", finished=True, failure=failure),
        site.told("a", 40, "", finished=True, missed=("b",)),
    ]
    async with Client(site.address) as client:
        events = [
            event
            async for event in client.profile(
                "fairy-tales", ["a", "b"], dtype=DType.FLOAT16, quick=True
            )
        ]
    assert events[0] == NodeProgress("a", 3, 40, "block: 64 tokens")  # type: ignore[arg-type]
    assert [(event.node, event.finished) for event in events] == [
        ("a", False),
        ("b", True),
        ("a", True),
    ]
    assert [event.missed for event in events] == [(), (), ("b",)]
    assert (
        isinstance(events[1].failure, UnavailableError) and events[1].failure.reason == "NODE_AWAY"
    )
    (request,) = site.sent(admin_pb2.ProfileRequest)
    assert (request.quick, request.again, list(request.nodes)) == (True, False, ["a", "b"])


async def test_leaving_a_profile_ends_the_call(site: Any) -> None:
    site.progress = [site.told("a", 1, "x"), site.Hold()]
    async with Client(site.address) as client:
        async with aclosing(client.profile("fairy-tales")) as events:
            assert (await anext(events)).node == "a"
        assert await asyncio.to_thread(site.cancelled.wait, 60)


async def test_a_profile_that_cannot_begin_raises(site: Any) -> None:
    site.failures["Profile"] = NotFoundError("model 'm' is not in the store", field="model")
    async with Client(site.address) as client:
        with pytest.raises(NotFoundError):
            await anext(client.profile("m"))


def test_the_synchronous_face_has_them_too(site: Any) -> None:
    site.measured(a=1e-3)
    site.progress = [site.told("a", 1, "x"), site.told("a", 40, "", finished=True)]
    with SyncClient(site.address) as client:
        assert client.node_details("a").profiles[0].age_s == 3600
        assert client.site("fairy-tales").profiles
        assert [event.done for event in client.profile("fairy-tales", quick=True)] == [1, 40]
