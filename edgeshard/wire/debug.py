"""Dumps, in parts that a message can hold: message <-> value."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator

from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.control.commands import DumpPart
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import NodeName, OperationId
from edgeshard.proto.v1 import admin_pb2, coordinator_pb2
from edgeshard.wire.status import from_failure, to_failure

PART_BYTES = 1 << 20


def parts_of(operation_id: OperationId, text: bytes) -> Iterator[DumpPart]:
    """An agent's dump, cut."""
    for start in range(0, max(len(text), 1), PART_BYTES):
        yield DumpPart(operation_id, text[start : start + PART_BYTES], last=start + PART_BYTES >= len(text))


def dump_part_to_wire(part: DumpPart) -> coordinator_pb2.DumpPart:
    return coordinator_pb2.DumpPart(operation_id=part.operation_id, part=part.part, last=part.last)


def dump_part_from_wire(message: coordinator_pb2.DumpPart) -> DumpPart:
    """Raises InvalidArgumentError for a part that is too long."""
    if len(message.part) > PART_BYTES:
        raise InvalidArgumentError(
            f"part: a part of a dump has at most {PART_BYTES} bytes, not {len(message.part)}", field="part"
        )
    return DumpPart(OperationId(message.operation_id), message.part, message.last)


def dump_messages(dump: ProcessDump) -> Iterator[admin_pb2.DumpResponse]:
    if dump.failure is not None:
        yield admin_pb2.DumpResponse(node=dump.node, failure=to_failure(dump.failure))
        return
    for start in range(0, max(len(dump.text), 1), PART_BYTES):
        yield admin_pb2.DumpResponse(node=dump.node, part=dump.text[start : start + PART_BYTES])


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
