"""edgectl trace, and the activity that describe prints for a deployment."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageExperts, StagePhase
from edgeshard.domain.requests.trace import ReadRecord, StageTrace, StepRecord
from edgeshard.proto.v1 import admin_pb2

COMPUTE_S, SEND_S = 0.010, 0.002
LAP_S = 2 * (COMPUTE_S + SEND_S)


def traced(stage: int, clock_s: float, steps: int = 40) -> StageTrace:
    """A stage of two that take turns: one step in flight."""
    records = []
    for step in range(steps):
        began = clock_s + step * LAP_S + stage * (COMPUTE_S + SEND_S)
        returned = began + LAP_S if stage == 0 else 0.0
        prompt = 5 if step == 0 else 0
        ended = began + COMPUTE_S
        records.append(
            StepRecord(step, prompt or 1, prompt, began, began, ended, ended + SEND_S, returned)
        )
    return StageTrace(stage, "ab"[stage], LayerRange(4 * stage, 4 * stage + 4), tuple(records))


@pytest.fixture
def busy(site: Any) -> Any:
    site.traces = [traced(0, 1000.0), traced(1, 7.0)]
    return site


def test_the_table_says_where_the_time_goes(edgectl: Any, busy: Any) -> None:
    result = edgectl("trace", "tales", "--seconds", "2")
    assert result.exit_code == 0, result.stderr
    (request,) = busy.sent(admin_pb2.TraceRequest)
    assert (request.deployment, request.seconds) == ("tales", 2.0)
    header, first, second = result.stdout.splitlines()
    assert header.split() == [
        "NODE", "LAYERS", "STEPS", "TOKENS/S", "COMPUTING", "SENDING", "IDLE",
        "STEP", "COMPUTES", "STEP", "WAITS",
    ]  # fmt: skip
    assert first.split() == [
        "a",
        "0:4",
        "40",
        "45.9",
        "42",
        "%",
        "8",
        "%",
        "50",
        "%",
        "10.0",
        "ms",
        "0.0",
        "ms",
    ]
    assert second.split()[:3] == ["b", "4:8", "40"]


def test_a_json_file_is_for_perfetto(edgectl: Any, busy: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert edgectl("trace", "tales", "-o", str(file)).exit_code == 0
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def test_the_data_alone_goes_to_stdout(edgectl: Any, busy: Any) -> None:
    result = edgectl("trace", "tales", "-o", "-")
    assert len(json.loads(result.stdout)["traceEvents"]) > 80
    assert "TOKENS/S" in result.stderr


def test_an_svg_file_shows_steps_and_bubbles(edgectl: Any, busy: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.svg"
    assert edgectl("trace", "tales", "-o", str(file)).exit_code == 0
    text = file.read_text()
    ElementTree.fromstring(text)
    assert "decode of step 20" in text and "step 39" not in text, "some steps from the middle"
    rows = re.findall("text-anchor: end[^>]*>([^<]*)<", text)
    assert rows == ["a 0:4", "a → b", "b 4:8", "b → a"]
    # While the one node computes the other waits: neither row is full.
    bars = [line for line in text.splitlines() if "a 0:4: decode" in line]
    assert 20 <= len(bars) <= 26


@pytest.mark.parametrize("name", ["json", "trace.html", "trace", "trace.JSON"])
def test_another_kind_of_file_is_refused_before_anything_runs(
    edgectl: Any, busy: Any, name: str
) -> None:
    result = edgectl("trace", "tales", "-o", name)
    assert (
        result.exit_code == 2
        and name in result.stderr
        and ".json" in result.stderr
        and ".svg" in result.stderr
    )
    assert not busy.requests


def test_a_directory_that_is_not_is_said_before_anything_runs(
    edgectl: Any, busy: Any, tmp_path: Path
) -> None:
    result = edgectl("trace", "tales", "-o", str(tmp_path / "none" / "trace.json"))
    assert result.exit_code == 2 and "--output" in result.stderr and not busy.requests


def test_a_file_that_cannot_be_written_is_said(edgectl: Any, busy: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.svg").mkdir()
    result = edgectl("trace", "tales", "-o", str(tmp_path / "trace.svg"))
    assert result.exit_code == 2 and "cannot write --output" in result.stderr


@pytest.mark.parametrize("seconds", ["0", "61", "nan"])
def test_the_time_is_bounded(edgectl: Any, busy: Any, seconds: str) -> None:
    result = edgectl("trace", "tales", "--seconds", seconds)
    assert (
        result.exit_code == 2
        and "seconds must be from 0.1 to 60" in result.stderr
        and not busy.requests
    )


def test_a_quiet_deployment_has_nothing_to_show(edgectl: Any, site: Any, tmp_path: Path) -> None:
    site.traces = [replace(traced(0, 0.0), records=()), replace(traced(1, 0.0), records=())]
    file = tmp_path / "trace.json"
    result = edgectl("trace", "tales", "-o", str(file))
    assert (
        result.exit_code == 1 and "send requests meanwhile" in result.stderr and not file.exists()
    )


def test_guesses_of_a_head_are_a_row_of_their_own_and_in_the_json(edgectl: Any, busy: Any) -> None:
    """The number of right guesses is unknown for a step that had not returned."""
    head = busy.traces[0]
    records = list(head.records)
    for step in (3, 4, 39):
        records[step] = replace(
            records[step], tokens=5, guesses=4, right_guesses=3 if step == 3 else 1
        )
    records[39] = replace(records[39], returned_s=0.0)
    busy.traces[0] = replace(head, records=tuple(records))
    result = edgectl("trace", "tales", "-o", "-")
    *_, header, row = result.stderr.splitlines()
    assert (
        " ".join(header.split())
        == "HEAD STEPS WITH GUESSES GUESSED A STEP RIGHT A STEP ROWS IN VAIN"
    )
    assert row.split() == ["a", "2", "4.0", "2.0", "4"]
    events = json.loads(result.stdout)["traceEvents"]
    steps = {
        event["args"]["step"]: event["args"]
        for event in events
        if event["ph"] == "X" and event["pid"] == 0
    }
    assert (steps[3]["guesses"], steps[3]["right_guesses"]) == (4, 3)
    assert (
        steps[39]["guesses"] == 4 and "right_guesses" not in steps[39] and "guesses" not in steps[5]
    )
    assert "STEPS WITH GUESSES" in edgectl("trace", "tales").stdout


def test_all_replicas_of_a_name_are_recorded_at_once_and_a_file_is_of_one(
    edgectl: Any, busy: Any, tmp_path: Path
) -> None:
    busy.replicate(3)
    busy.replicas[1] = replace(busy.replicas[1], phase=DeploymentPhase.WAITING)
    result = edgectl("trace", "tales", "--seconds", "2")
    assert result.exit_code == 0, result.stderr
    asked = sorted(request.deployment for request in busy.sent(admin_pb2.TraceRequest))
    assert asked == ["tales.1", "tales.3"], "one that is not ready runs no step"
    lines = [line for line in result.stdout.splitlines() if line.startswith("tales")]
    assert lines == ["tales.1:", "tales.3:"] and result.stdout.count("TOKENS/S") == 2
    busy.requests.clear()
    file = tmp_path / "trace.json"
    refused = edgectl("trace", "tales", "-o", str(file))
    assert refused.exit_code == 2 and "name one of tales.1, tales.2, tales.3" in refused.stderr
    assert (
        not busy.sent(admin_pb2.TraceRequest)
        and edgectl("trace", "tales.3", "-o", str(file)).exit_code == 0
    )


@pytest.fixture
def streaming(busy: Any) -> Any:
    """Node b reads a layer of 1 MiB in 4 ms, twice in each lap."""
    reads = tuple(
        ReadRecord(4 + n % 2, 1 << 20, 7 + n * LAP_S / 2, 7.004 + n * LAP_S / 2) for n in range(80)
    )
    busy.traces[1] = replace(busy.traces[1], reads=reads)
    return busy


def test_reads_of_weights_are_rows_of_a_table_of_their_own(edgectl: Any, streaming: Any) -> None:
    *_, blank, header, row = edgectl("trace", "tales").stdout.splitlines()
    assert not blank.strip()
    assert header.split() == ["NODE", "LAYERS", "READS", "READ", "RATE", "READING", "READ", "TAKES"]
    assert row.split() == ["b", "4:8", "80", "80", "MiB", "250", "MiB/s", "33", "%", "4.0", "ms"]


def test_reads_of_weights_are_a_row_of_the_picture_and_of_the_json(
    edgectl: Any, streaming: Any, tmp_path: Path
) -> None:
    picture = tmp_path / "trace.svg"
    assert edgectl("trace", "tales", "-o", str(picture)).exit_code == 0
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert ">b reads<" in text and "b reads: layer 5, " in text and ">a reads<" not in text
    result = edgectl("trace", "tales", "-o", "-")
    reads = [
        event for event in json.loads(result.stdout)["traceEvents"] if event.get("cat") == "read"
    ]
    assert len(reads) == 80 and {event["tid"] for event in reads} == {1}
    assert "READ TAKES" in result.stderr


def test_reads_of_experts_say_which(edgectl: Any, streaming: Any) -> None:
    reads = tuple(replace(read, expert=n % 8) for n, read in enumerate(streaming.traces[1].reads))
    streaming.traces[1] = replace(streaming.traces[1], reads=reads)
    result = edgectl("trace", "tales", "-o", "-")
    events = [
        event for event in json.loads(result.stdout)["traceEvents"] if event.get("cat") == "read"
    ]
    assert (
        events[5]["name"] == "read layer 5 expert 5"
        and events[5]["args"]["expert"] == 5
        and len(events) == 80
    )


def test_an_unknown_deployment_is_not_found(edgectl: Any, site: Any) -> None:
    site.failures["Trace"] = NotFoundError(
        "deployment: there is no deployment 'tales'", field="deployment"
    )
    assert edgectl("trace", "tales").exit_code == 3


def test_describe_counts_what_a_deployment_does(edgectl: Any, site: Any) -> None:
    head = replace(
        site.stage_status(StagePhase.ACTIVE),
        steps_done=120,
        tokens_done=456,
        busy_share=0.75,
        steps_waiting=2,
        requests_running=3,
        requests_waiting=4,
        micro_batches=2,
    )
    state = replace(site.deployment_in(DeploymentPhase.READY), stages=(head,), active_requests=7)
    site.states = [state]
    text = edgectl("describe", "deployment", "tales").stdout
    assert "7 running (4 of them waiting) in 2 micro-batches" in text
    header, row = text.splitlines()[-2:]
    assert header.split() == [
        "NODE",
        "PHASE",
        "STEPS",
        "TOKENS",
        "IDLE",
        "QUEUE",
        "KV",
        "IN",
        "USE",
    ]
    assert row.split()[:7] == ["a", "active", "120", "456", "25", "%", "2"]
    (stage,) = json.loads(edgectl("describe", "deployment", "tales", "-o", "json").stdout)["stages"]
    assert (stage["busy_share"], stage["requests_running"], stage["requests_waiting"]) == (
        0.75,
        3,
        4,
    )


def test_describe_shows_the_cache_of_a_node_with_its_experts_on_the_disk(
    edgectl: Any, site: Any
) -> None:
    experts = StageExperts(
        20 << 20, 30 << 20, 90 << 20, hits=750, misses=250, read_bytes=2 << 30, waited_s=1.5
    )
    status = replace(site.stage_status(StagePhase.ACTIVE), experts=experts)
    site.states = [replace(site.deployment_in(DeploymentPhase.READY), stages=(status,))]
    header, row = edgectl("describe", "deployment", "tales").stdout.splitlines()[-2:]
    names = ["NODE", "EXPERTS", "CACHED", "ROOM", "HITS", "MISSES", "HIT", "RATE", "READ", "WAITED"]
    assert header.split() == names
    assert " ".join(row.split()) == "a 90 MiB 20 MiB 30 MiB 750 250 75 % 2 GiB 1.50 s"
    (stage,) = json.loads(edgectl("describe", "deployment", "tales", "-o", "json").stdout)["stages"]
    assert (
        stage["experts"]["hits"] == 750
        and stage["experts"]["room_bytes"] == 30 << 20
        and not stage["streaming"]
    )
