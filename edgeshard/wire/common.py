"""Data types, layers, nodes and stage statuses: message <-> value."""

from __future__ import annotations

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.device import DeviceFacts, Node, StageStatus
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.codec import numbers, pair

dtype_to_wire, dtype_from_wire = numbers(DType, pb.DataType, "dtype")
facts_to_wire, facts_from_wire = pair(DeviceFacts, pb.DeviceFacts)
stage_status_to_wire, stage_status_from_wire = pair(StageStatus, pb.StageStatus)
node_to_wire, node_from_wire = pair(Node, pb.Node)
