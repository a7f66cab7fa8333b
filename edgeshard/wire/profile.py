"""Profiles of nodes and links: message <-> value.

What comes in is checked here: a profile that no measurement can have given would make every later plan untrue.
"""

from __future__ import annotations

import math

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    DiskProfile,
    EnergyProfile,
    LayerKind,
    LayerProfile,
    LinkProfile,
    MeasuredLink,
    MemoryProfile,
    Sample,
    StepOverhead,
)
from edgeshard.proto.v1 import profile_pb2 as pb
from edgeshard.wire.common import (
    dtype_from_wire,
    dtype_to_wire,
    message_of,
    quantisation_from_wire,
    quantisation_to_wire,
    value_of,
)

_KINDS = frozenset(kind.value for kind in LayerKind)


def compute_profile_to_wire(profile: ComputeProfile) -> pb.ComputeProfile:
    return message_of(
        profile,
        pb.ComputeProfile,
        dtype=dtype_to_wire(profile.dtype),
        layers=[_layer_to_wire(layer) for layer in profile.layers],
        overhead=message_of(profile.overhead, pb.StepOverhead),
        memory=message_of(profile.memory, pb.MemoryProfile),
        energy=None if profile.energy is None else message_of(profile.energy, pb.EnergyProfile),
        quantisation=quantisation_to_wire(profile.quantisation),
        disk=None if profile.disk is None else message_of(profile.disk, pb.DiskProfile),
    )


def compute_profile_from_wire(message: pb.ComputeProfile) -> ComputeProfile:
    """Raises InvalidArgumentError naming the field at fault."""
    overhead = message.overhead
    if not message.layers:
        raise InvalidArgumentError("layers of the profile are missing; measure again", field="layers")
    return value_of(
        message,
        ComputeProfile,
        dtype=dtype_from_wire(message.dtype),
        threads=_at_least(message.threads, 1, "threads"),
        layers=tuple(_layer_from_wire(layer) for layer in message.layers),
        overhead=StepOverhead(
            _measure(overhead.seconds, "overhead.seconds"),
            _measure(overhead.seconds_per_byte, "overhead.seconds_per_byte"),
            _measure(overhead.spread, "overhead.spread"),
        ),
        memory=value_of(message.memory, MemoryProfile),
        processor_share=_measure(message.processor_share, "processor_share"),
        energy=_energy_from_wire(message.energy) if message.HasField("energy") else None,
        quantisation=quantisation_from_wire(message.quantisation),
        others_share=_measure(message.others_share, "others_share"),
        disk=_disk_from_wire(message.disk) if message.HasField("disk") else None,
    )


def link_to_wire(link: MeasuredLink) -> pb.MeasuredLink:
    profile = link.profile
    return pb.MeasuredLink(
        sender_id=link.sender,
        receiver_id=link.receiver,
        profile=message_of(profile, pb.LinkProfile),
    )


def link_from_wire(message: pb.MeasuredLink) -> MeasuredLink:
    """Raises InvalidArgumentError naming the field at fault."""
    profile = message.profile
    return MeasuredLink(
        NodeId(message.sender_id),
        NodeId(message.receiver_id),
        LinkProfile(
            latency_s=_measure(profile.latency_s, "links.latency_s"),
            bandwidth_bps=_above_zero(profile.bandwidth_bps, "links.bandwidth_bps"),
            spread=_measure(profile.spread, "links.spread"),
            samples=_at_least(profile.samples, 2, "links.samples"),
            largest_bytes=profile.largest_bytes,
        ),
    )


def _layer_to_wire(layer: LayerProfile) -> pb.LayerProfile:
    return message_of(
        layer,
        pb.LayerProfile,
        prefill=[message_of(sample, pb.ProfileSample) for sample in layer.prefill],
        decode=[message_of(sample, pb.ProfileSample) for sample in layer.decode],
    )


def _layer_from_wire(message: pb.LayerProfile) -> LayerProfile:
    if message.kind not in _KINDS:
        raise InvalidArgumentError(
            f"layers.kind {message.kind!r} of the profile is unknown; run one version on all nodes", field="layers.kind"
        )
    return value_of(
        message,
        LayerProfile,
        kind=LayerKind(message.kind),
        layers=_at_least(message.layers, 1, "layers.layers"),
        prefill=tuple(_sample_from_wire(sample) for sample in message.prefill),
        decode=tuple(_sample_from_wire(sample) for sample in message.decode),
    )


def _sample_from_wire(message: pb.ProfileSample) -> Sample:
    return Sample(
        count=_at_least(message.count, 1, "samples.count"),
        context=message.context,
        seconds=_above_zero(message.seconds, "samples.seconds"),
        spread=_measure(message.spread, "samples.spread"),
        repeats=_at_least(message.repeats, 1, "samples.repeats"),
    )


def _energy_from_wire(message: pb.EnergyProfile) -> EnergyProfile:
    return EnergyProfile(
        _measure(message.idle_w, "energy.idle_w"), _measure(message.busy_w, "energy.busy_w"), message.source
    )


def _disk_from_wire(message: pb.DiskProfile) -> DiskProfile:
    return DiskProfile(
        _above_zero(message.read_bytes_per_s, "disk.read_bytes_per_s"),
        message.free_bytes,
        _measure(message.write_bytes_per_s, "disk.write_bytes_per_s"),
    )


def _measure(value: float, field: str) -> float:
    if not math.isfinite(value) or value < 0:
        raise InvalidArgumentError(f"{field} of the profile is {value}; measure again", field=field)
    return value


def _above_zero(value: float, field: str) -> float:
    if _measure(value, field) == 0:
        raise InvalidArgumentError(f"{field} of the profile is 0; measure again", field=field)
    return value


def _at_least(value: int, least: int, field: str) -> int:
    if value < least:
        raise InvalidArgumentError(
            f"{field} of the profile is {value}, not {least} or more; measure again", field=field
        )
    return value
