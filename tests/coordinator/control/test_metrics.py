"""The coordinator's counts of requests, which contain no data of users."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.control.requests.request_meter import KeyCounts, RequestMeter
from edgeshard_coordinator.control.runtime.conditions import TWIN_KEPT_S, TWIN_QUIET_S, Conditions

from edgeshard.domain.errors import NotFoundError, UnavailableError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId
from edgeshard.domain.nodes.device import Condition, StageExperts, StagePhase, StageStatus

TALE = DeploymentName("tale")


def figures(site: Any) -> dict[str, float]:
    """Each sample of a scrape by its name and labels."""
    text, _ = site.coordinator.metrics.exposition()
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(figure) for name, _, figure in (line.rpartition(" ") for line in lines)}


async def test_a_request_is_counted_and_timed(site: Any) -> None:
    _, head = await site.deployed()
    call = site.generate("very-own-id")
    await head.next_start()
    await head.accept("very-own-id")
    await head.admit("very-own-id")
    for index in range(3):
        await head.token("very-own-id", 3 + index, token=10 + index)
        await site.read(call)
    assert figures(site)['edgeshard_requests_running{deployment="tale",replica=""}'] == 1
    await head.finish("very-own-id")
    while await call.read() is not grpc.aio.EOF:
        pass
    found = figures(site)
    of = '{deployment="tale",replica=""}'
    assert (
        found[f"edgeshard_prompt_tokens_total{of}"] == 3
        and found[f"edgeshard_generated_tokens_total{of}"] == 3
    )
    assert found[f"edgeshard_time_to_first_token_seconds_count{of}"] == 1
    assert found[f"edgeshard_inter_token_latency_seconds_count{of}"] == 2
    assert found[f"edgeshard_request_queue_seconds_count{of}"] == 1
    assert found[f"edgeshard_request_prefill_seconds_count{of}"] == 1
    assert (
        found['edgeshard_requests_finished_total{deployment="tale",reason="length",replica=""}']
        == 1
    )
    assert found[f"edgeshard_requests_running{of}"] == 0
    assert found['edgeshard_requests_total{deployment="tale",replica="",role="none"}'] == 1
    assert found['vllm:generation_tokens_total{model_name="tale"}'] == 3
    assert found['vllm:request_success_total{finished_reason="length",model_name="tale"}'] == 1
    text = site.coordinator.metrics.exposition()[0].decode()
    assert "very-own-id" not in text and not re.search("once|<1[012]>", text), (
        "nothing of a user is a label"
    )


async def test_refusals_and_failures_are_counted_by_code(site: Any, failing: Any) -> None:
    _, head = await site.deployed()
    async with failing(NotFoundError):
        await site.generate("r0", model="nothing").read()
    call = site.generate("r1")
    await head.next_start()
    await head.accept("r1")
    await site.read(call)
    await head.fail("r1", UnavailableError("gone"))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    found = figures(site)
    assert found['edgeshard_requests_refused_total{code="not_found"}'] == 1
    assert (
        sum(
            figure
            for name, figure in found.items()
            if name.startswith("edgeshard_requests_failed_total")
        )
        == 1
    )


async def test_a_deleted_deployment_leaves_nothing_behind(site: Any) -> None:
    meter = site.coordinator.front.meter
    meter.began(TALE, "client/someone", 0.0, resumed=False)
    assert not [name for name in figures(site) if 'deployment="tale"' in name]
    assert not meter.kept([]), "names come and go, and memory must not grow with them"


async def test_what_a_node_says_of_its_machine_is_there_until_it_leaves(site: Any) -> None:
    (agent,) = await site.connected("a")
    conditions = site.coordinator.conditions
    connection = site.state.nodes["id-a"].connection
    conditions.came(
        NodeId("id-a"), connection, Condition(version="9.9", utc_s=1.0, swap_used_bytes=5)
    )
    found = figures(site)
    assert found['edgeshard_node_info{node="a",version="9.9"}'] == 1
    assert found['edgeshard_node_swap_used_bytes{node="a"}'] == 5
    assert found['edgeshard_node_clock_ahead_seconds{node="a"}'] < -1e9, "its clock is in 1970"
    await agent.vanish()
    await site.until(lambda state: not state.is_connected("id-a"))
    assert 'edgeshard_node_swap_used_bytes{node="a"}' not in figures(site)
    assert conditions.of("id-a") is None


async def test_caches_of_experts_are_told_as_their_nodes_say(site: Any) -> None:
    agents, _ = await site.deployed()
    (placed, *_) = site.state.deployments["tale"].placement.stages
    experts = StageExperts(
        20, room_bytes=30, total_bytes=90, hits=7, misses=3, read_bytes=60, waited_s=0.5
    )
    status = StageStatus(TALE, Epoch(1), 0, placed.layers, StagePhase.ACTIVE, experts=experts)
    assert "edgeshard_stage_experts" not in "".join(figures(site))
    await site.heard(agents[0], status)
    of, found = '{deployment="tale",node="a",replica="",stage="0"}', figures(site)
    assert {name: figure for name, figure in found.items() if "experts" in name} == {
        f"edgeshard_stage_experts_cached_bytes{of}": 20,
        f"edgeshard_stage_experts_room_bytes{of}": 30,
        f"edgeshard_stage_experts_size_bytes{of}": 90,
        f"edgeshard_stage_experts_hits_total{of}": 7,
        f"edgeshard_stage_experts_misses_total{of}": 3,
        f"edgeshard_stage_experts_read_bytes_total{of}": 60,
        f"edgeshard_stage_experts_wait_seconds_total{of}": 0.5,
    }


def test_the_end_of_an_older_connection_takes_nothing_from_a_newer_one() -> None:
    conditions, node = Conditions(lambda: None, lambda: 100.0), NodeId("id-a")
    conditions.came(node, 1, Condition(utc_s=90.0))
    conditions.came(node, 2, Condition(utc_s=103.0))
    conditions.left(node, 1)
    found = conditions.of(node)
    assert found is not None and found.clock_ahead_s == 3.0
    conditions.left(node, 2)
    assert conditions.of(node) is None


def test_a_twin_is_logged_once_a_minute_and_shown_until_it_stops() -> None:
    now = [100.0]
    conditions, node = Conditions(lambda: None, lambda: now[0]), NodeId("id-a")
    assert conditions.twin_of(node) == ""
    assert conditions.twin_came(node, "10.0.0.2:5") and not conditions.twin_came(node, "10.0.0.2:6")
    now[0] += TWIN_QUIET_S
    assert conditions.twin_came(node, "10.0.0.2:7") and conditions.twin_of(node) == "10.0.0.2:7"
    now[0] += TWIN_KEPT_S
    assert conditions.twin_of(node) == ""


def test_only_the_role_of_a_client_is_kept() -> None:
    meter = RequestMeter()
    for client in ("client/secret-app", "operator/alice", ""):
        meter.began(TALE, client, 0.0, resumed=False)
    assert dict(meter.of(TALE).begun) == {"client": 1, "operator": 1, "none": 1}


def test_what_a_key_used_is_counted_until_it_is_gone() -> None:
    meter = RequestMeter()
    old = meter.began(TALE, "key/app", 0.0, resumed=False)
    old.accepted(7)
    meter.began(TALE, "key/app", 0.0, resumed=True).token(1.0)
    meter.began(TALE, "client/app", 0.0, resumed=False).accepted(5)
    assert meter.of_key("key/app") == KeyCounts(requests=1, prompt_tokens=7, new_tokens=1)
    assert meter.of_key("client/app") == meter.of_key("key/b") == KeyCounts()
    meter.forget_key("key/app")
    old.token(2.0)
    assert meter.of_key("key/app") == KeyCounts(), "another key of this name has none of it"


def test_the_parts_of_a_request_make_up_the_whole() -> None:
    meter = RequestMeter()
    times, counts = meter.began(TALE, "", 10.0, resumed=False), meter.of(TALE)
    times.accepted(7)
    times.admitted(11.0)
    times.admitted(99.0)  # preempted for memory, and admitted once more
    for now in (13.0, 13.5, 14.0):
        times.token(now)
    times.finished("stop", 14.25)
    assert (counts.queue.sum, counts.prefill.sum, counts.decode.sum, counts.whole.sum) == (
        1.0,
        2.0,
        1.0,
        4.25,
    )
    assert (counts.first_token.sum, counts.between_tokens.sum, counts.new_tokens) == (3.0, 1.0, 3)


def test_a_request_that_is_resumed_is_timed_from_token_to_token_only() -> None:
    meter = RequestMeter()
    times, counts = meter.began(TALE, "", 10.0, resumed=True), meter.of(TALE)
    times.accepted(7)
    times.admitted(11.0)
    times.token(12.0)
    times.token(12.5)
    times.finished("stop", 13.0)
    assert not counts.begun and counts.prompt_tokens == 0
    assert counts.first_token.count == counts.whole.count == counts.queue.count == 0
    assert (counts.between_tokens.sum, counts.finished["stop"]) == (0.5, 1)


def test_recoveries_are_counted_by_what_took_the_service_up() -> None:
    meter = RequestMeter()
    meter.head_back(TALE, Epoch(1), 1.0)
    assert not meter.of(TALE).pauses.count, "the first head recovers nothing"
    meter.head_lost(TALE, Epoch(1), 2.0)
    meter.head_back(TALE, Epoch(1), 2.5)
    meter.head_lost(TALE, Epoch(1), 5.0)
    meter.head_lost(TALE, Epoch(1), 6.0)
    meter.head_back(TALE, Epoch(2), 9.0)
    counts = meter.of(TALE)
    assert dict(counts.recovered) == {"epoch": 1, "stream": 1} and counts.pauses.sum == 4.5


def test_a_failure_is_counted_by_its_code() -> None:
    meter = RequestMeter()
    meter.began(TALE, "", 0.0, resumed=False).failed(UnavailableError("gone"))
    assert meter.of(TALE).failed["unavailable"] == 1
