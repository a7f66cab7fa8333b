"""Packed units: message <-> value."""

from __future__ import annotations

from edgeshard.domain.models.packed import DropCall, PackedUnit
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.codec import pair

packed_unit_to_wire, packed_unit_from_wire = pair(PackedUnit, pb.PackedUnit)
drop_call_to_wire, drop_call_from_wire = pair(DropCall, admin_pb2.DropPackedRequest)
