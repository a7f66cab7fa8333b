"""Snapshots of requests, of their waiting times, and of steps: only figures, without any text of
users."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.control.requests.request_meter import RequestMeter
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.dashboard.camera import RECENT_S, Recent
from edgeshard_coordinator.dashboard.picture import (
    DRAWN_STEPS,
    MOST_REQUESTS,
    TRACED_STEPS,
    known,
    measured_picture,
    nodes_picture,
    requests_picture,
    timeline_picture,
)

from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import Node, StagePhase, StageStatus
from edgeshard.domain.requests.generation import FinishReason, Generation
from edgeshard.domain.requests.trace import StageTrace, StepRecord
from tests.support.scripted_site import facts

TALES = DeploymentName("tales")
SECRET = "once upon a time there was a secret"
HEAD = Attachment(TALES, Epoch(1), NodeId("id-a"), NodeName("a"), 1)


def request_of(
    meter: RequestMeter, name: str = "r1", client: str = "key/shop", began_at: float = 10.0
) -> RunningRequest:
    request = RunningRequest(
        RequestId(name), TALES, Generation(SECRET, 64), client, parked_at=began_at
    )
    request.times = meter.began(TALES, client, began_at, resumed=False)
    return request


def test_a_request_is_who_asks_and_how_far_it_is() -> None:
    request = request_of(RequestMeter())

    def seen(now: float) -> dict[str, object]:
        picture = requests_picture([request], now, {})
        assert "secret" not in json.dumps(picture)
        assert picture["r1"].pop("who") == "key/shop" and picture["r1"].pop("deployment") == "tales"
        found: dict[str, object] = picture["r1"]
        return found

    assert seen(10.4) == {"state": "parked", "new": 0, "limit": 64, "age_s": 0}
    request.attachment, request.prompt_tokens = HEAD, (901, 902, 903)
    assert seen(12.0) == {
        "state": "queued",
        "prompt": 3,
        "read": 0,
        "new": 0,
        "limit": 64,
        "age_s": 2,
    }
    request.times.admitted(12.0)
    request.read = 2
    assert (seen(12.0)["state"], seen(12.0)["read"]) == ("reading", 2)
    request.emitted += [904, 905]
    assert seen(13.0) == {
        "state": "writing",
        "prompt": 3,
        "read": 3,
        "new": 2,
        "limit": 64,
        "age_s": 3,
    }
    assert not any(
        str(token) in json.dumps(requests_picture([request], 13.0, {})) for token in range(901, 906)
    )


def test_a_figure_that_is_not_finite_is_not_known() -> None:
    """Sums of what nodes report are in no type: two of -1e308 are no number of JSON."""
    assert known(a=float("nan"), b=float("inf"), c=-float("inf"), d=None, e=1.5, f=0) == {
        "e": 1.5,
        "f": 0,
    }
    stage = StageStatus(
        deployment=TALES,
        epoch=Epoch(1),
        stage=0,
        layers=LayerRange(0, 1),
        phase=StagePhase.READY,
        busy_share=-1e308,
    )
    node = Node(
        node_id=NodeId("id-a"),
        name=NodeName("a"),
        address="127.0.0.1:1",
        wire_version=1,
        facts=facts(),
        connected=True,
        heartbeat_age_s=0.1,
        free_bytes=1,
        stages=(stage, replace(stage, stage=1)),
    )
    json.dumps(nodes_picture([node]), allow_nan=False)
    assert "load" not in nodes_picture([node])["a"]


def test_a_request_that_may_fill_its_context_has_no_limit_to_show() -> None:
    request = request_of(RequestMeter())
    request.prompt_tokens = (901, 902, 903)

    def limit(context: int) -> object:
        return requests_picture([request], 11.0, {TALES: context})["r1"].get("limit")

    assert [limit(0), limit(68), limit(67), limit(10)] == [64, 64, None, None]


def test_one_that_came_back_waits_until_its_first_token() -> None:
    meter = RequestMeter()
    request = RunningRequest(
        RequestId("r1"), TALES, Generation(SECRET, 64), "", (1, 2), attachment=HEAD
    )
    request.times = meter.began(TALES, "", 10.0, resumed=True)
    assert requests_picture([request], 11.0, {})["r1"]["state"] == "queued"
    request.times.token(11.0)
    found = requests_picture([request], 11.0, {})["r1"]
    assert found["state"] == "writing" and "who" not in found


def test_the_first_requests_are_shown() -> None:
    meter = RequestMeter()
    picture = requests_picture(
        [request_of(meter, f"r{number}") for number in range(MOST_REQUESTS + 5)], 11.0, {}
    )
    assert list(picture) == [f"r{number}" for number in range(MOST_REQUESTS)]


def test_percentiles_are_of_the_last_minute() -> None:
    meter, recent = RequestMeter(), Recent()
    counts = {"tales": meter.of(TALES)}

    def at(now: float) -> dict[str, Any]:
        return recent.of(now, counts)["tales"]

    counts["tales"].first_token.add(100.0)
    assert at(0.0) == {}, "nobody looked when that came"
    for _ in range(100):
        counts["tales"].first_token.add(0.07)
        counts["tales"].between_tokens.add(0.002)
    found = at(10.0)
    assert found["first_token"] == pytest.approx(
        {"p50": 0.075, "p95": 0.0975, "p99": 0.0995}, abs=1e-5
    )
    assert found["between_tokens"] == pytest.approx(
        {"p50": 0.00175, "p95": 0.002425, "p99": 0.002485}, abs=1e-5
    )
    for now in range(15, 60, 5):
        assert at(now) == found
    counts["tales"].first_token.add(3.0)
    for now in range(60, int(RECENT_S) + 20, 5):
        late = at(now)
    assert late == {"first_token": {"p50": 3.75, "p95": 4.875, "p99": 4.975}}, (
        "alone: the others are older"
    )
    assert at(10 * RECENT_S) == {}, "and nobody looked meanwhile"


def test_a_deployment_of_the_same_name_begins_anew() -> None:
    meter, recent = RequestMeter(), Recent()
    meter.of(TALES).first_token.add(0.07)
    recent.of(0.0, {"tales": meter.of(TALES)})
    meter.kept(())
    meter.of(TALES).first_token.add(3.0)
    found = recent.of(10.0, {"tales": meter.of(TALES)})["tales"]
    assert found["first_token"]["p50"] == 3.75


def test_pauses_are_the_mean_and_the_last() -> None:
    meter = RequestMeter()
    for lost, back in ((10.0, 11.0), (20.0, 23.5)):
        meter.head_lost(TALES, Epoch(1), lost)
        meter.head_back(TALES, Epoch(2), back)
    request_of(meter).times.finished(FinishReason.LENGTH, 12.0)
    found = measured_picture(meter.of(TALES))
    assert (found["pauses"], found["pause_s"], found["last_pause_s"]) == (2, 2.25, 3.5)
    assert (found["begun"], found["failed"]) == (1, 0)
    assert "last_pause_s" not in measured_picture(meter.of(DeploymentName("other")))


STEP_S, LAP_S = 0.010, 0.024


def trace_of(stage: int, clock_s: float, steps: int) -> StageTrace:
    """A stage of two that take turns, on a clock of its own."""
    records = []
    for step in range(steps):
        began = clock_s + step * LAP_S + stage * LAP_S / 2
        returned = began + LAP_S if stage == 0 else 0.0
        ended = began + STEP_S
        records.append(
            StepRecord(step, 2, 2 if step == 0 else 0, began, began, ended, ended + 0.002, returned)
        )
    return StageTrace(stage, "ab"[stage], LayerRange(4 * stage, 4 * stage + 4), tuple(records))


def test_a_timeline_is_bars_of_the_newest_steps_on_one_clock() -> None:
    found = timeline_picture([trace_of(1, 7.0, 400), trace_of(0, 1000.0, 400)])
    first, second = found["stages"]
    assert (first["node"], first["layers"], second["node"], first["steps"]) == (
        "a",
        "0:4",
        "b",
        TRACED_STEPS,
    )
    assert [bar[0] for bar in first["bars"]] == list(range(400 - DRAWN_STEPS, 400))
    assert first["bars"][0] == [400 - DRAWN_STEPS, 0, 10_000, 2, 0]
    assert second["bars"][0][1] == pytest.approx(12_000, abs=5), (
        "half a lap later, whatever its clock says"
    )
    assert found["span_us"] == pytest.approx(
        1e6 * ((DRAWN_STEPS - 1) * LAP_S + 0.012 + STEP_S), abs=5
    )
    assert first["step_s"] == pytest.approx(STEP_S) and first["computing"] == pytest.approx(
        10 / 24, abs=0.01
    )
    assert first["idle"] == pytest.approx(0.5, abs=0.01)


def test_a_timeline_without_steps_is_empty() -> None:
    quiet = [replace(trace_of(stage, 1.0, 1), records=()) for stage in range(2)]
    found = timeline_picture(quiet)
    assert found["span_us"] == 0 and all(stage["bars"] == [] for stage in found["stages"])
