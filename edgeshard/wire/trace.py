"""Traces of stages: message <-> value."""

from __future__ import annotations

from edgeshard.domain.requests.trace import StageTrace
from edgeshard.proto.v1 import trace_pb2 as pb
from edgeshard.wire.codec import pair

trace_to_wire, trace_from_wire = pair(StageTrace, pb.StageTrace)
