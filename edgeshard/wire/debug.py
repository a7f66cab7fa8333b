"""Dumps, in parts that a message can hold: message <-> value."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator

from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.control.commands import MOST_PART_BYTES, DumpPart
from edgeshard.domain.ids import NodeName, OperationId
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2
from edgeshard.wire.codec import from_failure, pair, to_failure

dump_part_to_wire, dump_part_from_wire = pair(DumpPart, coordinator_pb2.DumpPart)


def parts_of(operation_id: OperationId, text: bytes) -> Iterator[DumpPart]:
    """An agent's dump, cut."""
    for start in range(0, max(len(text), 1), MOST_PART_BYTES):
        yield DumpPart(
            operation_id,
            text[start : start + MOST_PART_BYTES],
            last=start + MOST_PART_BYTES >= len(text),
        )


def dump_messages(dump: ProcessDump) -> Iterator[admin_pb2.DumpResponse]:
    if dump.failure is not None:
        yield admin_pb2.DumpResponse(node=dump.node, failure=to_failure(dump.failure))
        return
    for start in range(0, max(len(dump.text), 1), MOST_PART_BYTES):
        yield admin_pb2.DumpResponse(
            node=dump.node, part=dump.text[start : start + MOST_PART_BYTES]
        )


async def read_dumps(messages: AsyncIterable[admin_pb2.DumpResponse]) -> AsyncIterator[ProcessDump]:
    """The dumps of one call: the coordinator's first, then the nodes'."""
    node, parts = "", list[bytes]()
    async for message in messages:
        if message.node != node:
            if parts:
                yield ProcessDump(NodeName(node), b"".join(parts))
            node, parts = message.node, []
        if message.HasField("failure"):
            yield ProcessDump(NodeName(node), failure=from_failure(message.failure))
        else:
            parts.append(message.part)
    if parts:
        yield ProcessDump(NodeName(node), b"".join(parts))
