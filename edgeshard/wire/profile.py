"""Profiles of nodes and links: message <-> value."""

from __future__ import annotations

from edgeshard.domain.nodes.profile import ComputeProfile, MeasuredLink
from edgeshard.proto.v1 import profile_pb2 as pb
from edgeshard.wire.codec import pair

compute_profile_to_wire, compute_profile_from_wire = pair(ComputeProfile, pb.ComputeProfile)
link_to_wire, link_from_wire = pair(MeasuredLink, pb.MeasuredLink)
