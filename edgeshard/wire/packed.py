"""Packed units: message <-> value."""

from __future__ import annotations

from edgeshard.domain.ids import OperationId, check_id
from edgeshard.domain.models.packed import DropCall, PackedUnit
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.common import message_of, value_of


def packed_unit_to_wire(unit: PackedUnit) -> pb.PackedUnit:
    return message_of(unit, pb.PackedUnit)


def packed_unit_from_wire(message: pb.PackedUnit) -> PackedUnit:
    """Raises InvalidArgumentError for an id that cannot be."""
    return value_of(message, PackedUnit, id=check_id(message.id, "packed.id"))


def drop_call_to_wire(call: DropCall) -> admin_pb2.DropPackedRequest:
    return admin_pb2.DropPackedRequest(operation_id=call.operation_id, node=call.node, ids=call.ids)


def drop_call_from_wire(message: admin_pb2.DropPackedRequest) -> DropCall:
    return DropCall(OperationId(message.operation_id), message.node, tuple(message.ids))
