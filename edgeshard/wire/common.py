"""Data types, layers, nodes and stage statuses: message <-> value."""

from __future__ import annotations

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.condition import Condition
from edgeshard.domain.nodes.device import DeviceFacts, HugePages, Node, StageKey, StageStatus
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.wire.codec import numbers, pair

dtype_to_wire, dtype_from_wire = numbers(DType, pb.DataType, "dtype")
layers_to_wire, layers_from_wire = pair(LayerRange, pb.LayerRange)
facts_to_wire, facts_from_wire = pair(DeviceFacts, pb.DeviceFacts)
stage_status_to_wire, stage_status_from_wire = pair(StageStatus, pb.StageStatus)
stage_key_to_wire, stage_key_from_wire = pair(StageKey, pb.StageKey)
huge_pages_to_wire, huge_pages_from_wire = pair(HugePages, pb.HugePages)
node_to_wire, node_from_wire = pair(Node, pb.Node)
condition_to_wire, condition_from_wire = pair(Condition, pb.Condition)
