"""A short run of the fuzzer of agents' messages, and the messages that it builds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeshard.domain.control.commands import MOST_STAGES
from edgeshard.proto.v1 import coordinator_pb2, head_pb2
from tests.support.any_messages import MessageBuilder, bounds
from tests.support.forms import in_form

ROOT = Path(__file__).resolve().parents[2]
SECONDS = in_form(6, 90)


@pytest.mark.timing
@pytest.mark.timeout(300)
def test_a_coordinator_answers_any_message_of_an_agent() -> None:
    """In a process of its own: Python looks for garbage in callbacks, and a process of tests has
    much of it."""
    command = [sys.executable, "-m", "tests.fuzz.agents", "--seconds", str(SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["sent"] > 50 and report["refusals"] and not report["findings"]


@pytest.mark.parametrize(
    "kind", [coordinator_pb2.ControlRequest, head_pb2.AttachRequest], ids=["control", "attach"]
)
def test_each_member_of_a_message_is_built(kind: Any) -> None:
    builder = MessageBuilder(random.Random(1), lambda field: (), most_items=10)
    built: list[Any] = [builder.build(kind) for _ in range(400)]
    (oneof,) = kind.DESCRIPTOR.oneofs
    assert {message.WhichOneof("message") for message in built} == {
        None,
        *(field.name for field in oneof.fields),
    }


def test_a_seed_builds_the_same_messages() -> None:
    def built(seed: int) -> list[bytes]:
        builder = MessageBuilder(
            random.Random(seed), lambda field: ("known",) if field == "node_id" else ()
        )
        kind = coordinator_pb2.RegisterRequest
        return [builder.build(kind).SerializeToString(deterministic=True) for _ in range(20)]

    assert built(3) == built(3) != built(4)
    assert any(b"known" in data for data in built(3))


def test_lists_have_as_many_items_as_their_bound_and_one_more_or_less() -> None:
    assert bounds()["edgeshard.proto.v1.HeartbeatRequest", "stages"] == MOST_STAGES
    builder = MessageBuilder(
        random.Random(1), lambda field: (), most_items=5000, most_bytes=20 << 20, many=1.0
    )
    counts = {len(builder.build(coordinator_pb2.HeartbeatRequest).stages) for _ in range(200)}
    assert {MOST_STAGES - 1, MOST_STAGES, MOST_STAGES + 1} <= counts
