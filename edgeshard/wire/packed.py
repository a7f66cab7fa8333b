"""Packed units: message <-> value."""

from __future__ import annotations

from edgeshard.domain.ids import OperationId, check_id
from edgeshard.domain.models.packed import DropCall, PackedUnit
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1 import common_pb2 as pb


def packed_unit_to_wire(unit: PackedUnit) -> pb.PackedUnit:
    return pb.PackedUnit(
        id=unit.id,
        model=unit.model,
        unit=unit.unit,
        form=unit.form,
        size_bytes=unit.size_bytes,
        in_use=unit.in_use,
        model_name=unit.model_name,
    )


def packed_unit_from_wire(message: pb.PackedUnit) -> PackedUnit:
    """Raises InvalidArgumentError for an id that cannot be."""
    return PackedUnit(
        id=check_id(message.id, "packed.id"),
        model=message.model,
        unit=message.unit,
        form=message.form,
        size_bytes=message.size_bytes,
        in_use=message.in_use,
        model_name=message.model_name,
    )


def drop_call_to_wire(call: DropCall) -> admin_pb2.DropPackedRequest:
    return admin_pb2.DropPackedRequest(operation_id=call.operation_id, node=call.node, ids=call.ids)


def drop_call_from_wire(message: admin_pb2.DropPackedRequest) -> DropCall:
    return DropCall(OperationId(message.operation_id), message.node, tuple(message.ids))
