"""Each lie changes a message, and the other attackers work as designed."""

from __future__ import annotations

import asyncio
import json
import random
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from edgeshard_agent.scheduler.scheduler import Limits

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.generation import StageTiming
from edgeshard.domain.requests.step import ReturnedStep, SampledToken, StepResult
from edgeshard.proto.v1 import head_pb2
from edgeshard.wire.frames import FrameContract, FrameReader, encode_step
from tests.attack import costly_bodies, local_user, lying_node, middle
from tests.attack.lying_agent import HEAD, LAST_STAGE, Lies, begins_request, is_result
from tests.support.rig import Rig

MAX_REFUSAL_S = 0.1
"""Limit of processor time."""
RESULT = ReturnedStep(4, StepResult((SampledToken(1, 7, 9),), (StageTiming(1, 0.1, 0.1),)))


def accepted() -> head_pb2.AttachRequest:
    return head_pb2.AttachRequest(accepted=head_pb2.HeadAccepted(request_id="r", prompt_tokens=[1]))


def token() -> head_pb2.AttachRequest:
    return head_pb2.AttachRequest(token=head_pb2.HeadToken(request_id="r", position=3, text="x"))


def finished() -> head_pb2.AttachRequest:
    return head_pb2.AttachRequest(finished=head_pb2.HeadFinished(request_id="r"))


def test_all_messages_of_a_request_have_one_lie_once_lying_has_begun() -> None:
    lies = Lies(HEAD, begins_request)
    assert lies.change(token()) == token()
    lies.begun = True
    texts = []
    for _ in HEAD:
        assert begins_request(lies.change(accepted()))
        changed = [lies.change(message) for message in (token(), token(), finished())]
        texts.append(changed)
    assert all(lies.told[name] for name in HEAD)
    assert (
        lies.told["many top"] == 2 and lies.told["no end"] == 1 and lies.told["a long prompt"] == 1
    )
    assert all(changed[0] == changed[1] for changed in texts)


@pytest.mark.parametrize("name", HEAD)
def test_each_lie_of_a_head_changes_a_message(name: str) -> None:
    lie = HEAD[name]
    changes = [(lie(message), message) for message in (accepted(), token(), finished())]
    fitting = [
        (changed, make)
        for (changed, _), make in zip(changes, (accepted, token, finished), strict=True)
    ]
    assert [make for changed, make in fitting if changed is not None and changed != make()]


@pytest.mark.parametrize("name", LAST_STAGE)
def test_each_lie_of_a_last_stage_can_be_sent(name: str) -> None:
    changed = LAST_STAGE[name](RESULT)
    assert is_result(changed) and changed != RESULT
    assert encode_step("tales", 1, changed) != encode_step("tales", 1, RESULT)


@pytest.mark.parametrize("name", LAST_STAGE)
def test_each_lie_of_a_last_stage_is_refused_before_it_costs_the_heads_node_time(name: str) -> None:
    """Other deployments have heads on that event loop, too. 100,000 tokens of one result took it
    0.3 s before they were counted, and longer on a busy machine."""
    rig = Rig(limits=Limits(48, 100, 97))
    rig.submit("one", [1, 2], 4)
    step = rig.formed_step()
    result = replace(
        rig.stages[0].run(step), timings=(StageTiming(0, 0.1, 0.1), StageTiming(1, 0.1, 0.1))
    )
    frames = encode_step("lure", 1, LAST_STAGE[name](ReturnedStep(step.number, result)))
    reader = FrameReader(
        FrameContract("lure", 1, DType.FLOAT32, 0, max_tokens=32, window=4, max_timings=2)
    )
    reader.restart_stream()
    began_s = time.thread_time()
    with pytest.raises(EdgeShardError):
        for frame in frames:
            for returned in reader.accept(frame).steps:
                assert isinstance(returned, ReturnedStep)
                rig.scheduler.on_result(returned.number, returned.result, 0.0)
    assert time.thread_time() - began_s < MAX_REFUSAL_S


def test_a_lying_node_speaks_of_the_deployments_that_there_are() -> None:
    found = lying_node.messages("id", "i", {"tales": 3})
    failed = found["failed stages"][0].heartbeat.stages
    assert [(each.deployment, each.epoch) for each in failed] == [("tales", 3)]
    epochs = {each.epoch for each in found["stages of later epochs"][0].heartbeat.stages}
    assert epochs == {2**64 - 1}
    assert len({message.result.operation_id for message in found["answers to no command"]}) == 3000


def test_costly_bodies_are_json_of_the_sizes_that_they_stand_for() -> None:
    found = costly_bodies.bodies("tales")
    assert all(json.loads(body)["model"] == "tales" for _, body in found.values())
    assert len(found["many allOf"][1]) > 600_000 and len(found["a long reference"][1]) > 8_000_000


def test_another_user_finds_what_is_open_and_only_that(tmp_path: Path) -> None:
    for name, mode in (("open", 0o755), ("closed", 0o700)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "file").write_text("x")
        (directory / "file").chmod(0o644)
        directory.chmod(mode)
    assert list(local_user.open_to_others(tmp_path)) == ["file: anybody may open it"]
    (tmp_path / "open" / "file").chmod(0o600)
    assert not list(local_user.open_to_others(tmp_path))
    tmp_path.chmod(stat.S_IRWXU)
    assert not local_user.is_open(tmp_path)


@pytest.mark.asyncio
async def test_a_machine_in_the_middle_forwards_what_it_makes_of_each_part() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        await writer.drain()
        writer.close()

    def double(part: bytes, dice: random.Random) -> tuple[float, bytes | None]:
        return 0.0, 2 * part

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, middle.between(target, double, random.Random(1)) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"ab")
        assert await asyncio.wait_for(reader.read(), 10.0) == 4 * b"ab"
        writer.close()


def test_each_way_of_meddling_changes_some_parts_but_a_delay() -> None:
    dice = random.Random(1)
    for way in middle.WAYS:
        met = [way(b"part", dice) for _ in range(200)]
        assert any(changed != b"part" for _, changed in met) or (
            way is middle.delay and any(s for s, _ in met)
        )
        assert any(changed == b"part" for _, changed in met)
