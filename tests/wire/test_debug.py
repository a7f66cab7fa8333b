"""Dumps over the wire: cut into parts and whole again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.control.commands import MOST_PART_BYTES as PART_BYTES
from edgeshard.domain.control.commands import DumpPart, TakeDump
from edgeshard.domain.errors import InvalidArgumentError, UnavailableError
from edgeshard.domain.ids import NodeName, OperationId
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2
from edgeshard.wire.control import command_from_wire, command_to_wire
from edgeshard.wire.debug import (
    dump_messages,
    dump_part_from_wire,
    dump_part_to_wire,
    parts_of,
    read_dumps,
)

OPERATION = OperationId("op")


def test_the_command_comes_back_as_it_was() -> None:
    assert command_from_wire(command_to_wire(OPERATION, TakeDump())) == ("op", TakeDump())


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_a_nodes_dump_is_cut_into_parts_that_a_message_holds(size: int) -> None:
    text = bytes(range(256)) * (size // 256) + bytes(size % 256)
    parts = [dump_part_from_wire(dump_part_to_wire(part)) for part in parts_of(OPERATION, text)]
    assert b"".join(part.part for part in parts) == text
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.operation_id for part in parts} == {"op"}


def test_a_part_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="part"):
        dump_part_from_wire(coordinator_pb2.DumpPart(operation_id="op", part=bytes(PART_BYTES + 1)))
    part = DumpPart(OPERATION, bytes(PART_BYTES), last=True)
    assert dump_part_from_wire(dump_part_to_wire(part)) == part


async def test_dumps_of_several_processes_come_back_as_they_were() -> None:
    dumps = [
        ProcessDump(NodeName(""), b"c" * (2 * PART_BYTES + 1)),
        ProcessDump(
            NodeName("a"), failure=UnavailableError("away", reason="NODE_AWAY", retry_after_s=1.0)
        ),
        ProcessDump(NodeName("b"), b"{}"),
        ProcessDump(NodeName("c"), b"x" * PART_BYTES),
        ProcessDump(NodeName("d"), failure=UnavailableError("away too")),
    ]

    async def messages() -> AsyncIterator[admin_pb2.DumpResponse]:
        for dump in dumps:
            for message in dump_messages(dump):
                assert message.ByteSize() < PART_BYTES + 100
                yield message

    assert [dump async for dump in read_dumps(messages())] == dumps
