"""Seeds of the whole system in simulated time, and cores that are broken on purpose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from edgeshard.proto.v1 import (
    admin_pb2,
    coordinator_pb2,
    head_pb2,
    identity_pb2,
    inference_pb2,
    stage_pb2,
    store_pb2,
)
from tests.simulator import broken
from tests.simulator.coverage import ABSENT, MESSAGES
from tests.support.forms import day, in_form, of_the_day

ROOT = Path(__file__).resolve().parents[2]
SEEDS = in_form(15, 150)
FIRST = in_form(0, SEEDS * day())
"""The long form plays others each day."""
BROKEN = of_the_day(0, list(broken.ALL))


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a seed decides all that happens there."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
def test_no_seed_violates_anything() -> None:
    done = _run("tests.simulator.run", "--first", str(FIRST), "--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    least = re.search(r"^least met guess: .*, in (\d+) seeds$", done.stdout, re.MULTILINE)
    assert least is not None and int(least[1]) > 0, "the simulated requests get no draft tokens"


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_seed_is_the_same_each_time() -> None:
    first, second = (
        _run("tests.simulator.run", "--first", "11", "--seeds", "1", "--trace").stdout
        for _ in range(2)
    )
    said = [
        [line for line in text.splitlines() if " seeds in " not in line] for text in (first, second)
    ]
    assert said[0] == said[1] and len(said[0]) > 30


def test_the_tables_hold_every_message_of_every_service() -> None:
    """A new one goes into `MESSAGES`, or into `ABSENT` with the reason why it is not sent here."""
    found: set[str] = set()
    for file in (
        coordinator_pb2,
        head_pb2,
        stage_pb2,
        inference_pb2,
        admin_pb2,
        store_pb2,
        identity_pb2,
    ):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found |= _kinds(method.input_type) | _kinds(method.output_type)
    found -= {"ExchangeRequest", "ExchangeResponse"}
    alternatives = stage_pb2.LinkMessage.DESCRIPTOR.oneofs_by_name["message"].fields
    found |= {f"Link {field.name}" for field in alternatives} | {"Link padding"}
    assert found == MESSAGES.keys() | ABSENT.keys()
    assert not MESSAGES.keys() & ABSENT.keys()


def _kinds(message: Descriptor) -> set[str]:
    """As `tests.simulator.network.kind_of` names them."""
    oneofs = [oneof for oneof in message.oneofs if not oneof.name.startswith("_")]
    if len(oneofs) != 1:
        return {message.name}
    return {f"{message.name} {field.name}" for field in oneofs[0].fields}


@pytest.fixture(scope="module")
def caught() -> dict[str, dict[str, object]]:
    done = _run("tests.simulator.broken", *BROKEN)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return {line["core"]: line for line in lines}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("core", BROKEN)
def test_a_broken_core_is_caught(core: str, caught: dict[str, dict[str, object]]) -> None:
    assert caught[core]["seed"] is not None, f"{core} was not noticed in {broken.LIMIT} seeds"
