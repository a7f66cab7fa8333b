"""Nodes' measurements of themselves and of their links, as the coordinator keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from edgeshard.domain.control.commands import MeasureCompute, ProfileReport
from edgeshard.domain.ids import NodeId
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    DiskProfile,
    LayerKind,
    LinkProfile,
    MeasuredLink,
    config_hash,
)
from edgeshard.profiles.fit import fit_profile

ValueT = TypeVar("ValueT")

MAX_PROFILES = 256
"""Profiles that are kept of one node; those reported longest ago go first."""
ProfileKey = tuple[str, DType, Quantisation | None]
"""A model's shape, from `edgeshard.domain.nodes.profile.config_hash`, and the format of its
weights."""


@dataclass(frozen=True, slots=True)
class Reported(Generic[ValueT]):
    """A measured value and its time of arrival, in monotonic seconds."""

    value: ValueT
    reported_at: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of one node: its times by model and weights, and its links by receiver. All
    profiles are of one device."""

    profiles: Mapping[ProfileKey, Reported[ComputeProfile]] = field(default_factory=dict)
    links: Mapping[NodeId, Reported[LinkProfile]] = field(default_factory=dict)
    saved: bool = True

    def reported(self, report: ProfileReport, now: float) -> Measurements:
        """The measurements with a new report. Profiles of another fingerprint than the newest are
        of a former device, and dropped."""
        fresh = {key_of(profile): Reported(profile, now) for profile in report.compute}
        profiles = {key: entry for key, entry in self.profiles.items() if key not in fresh}
        if report.compute:
            fingerprint = report.compute[-1].fingerprint
            profiles = {
                key: entry
                for key, entry in {**profiles, **fresh}.items()
                if entry.value.fingerprint == fingerprint
            }
            newest = list(profiles.items())[-MAX_PROFILES:]
            profiles = dict(newest)
        links = {link.receiver: Reported(link.profile, now) for link in report.links}
        return Measurements(profiles, {**self.links, **links}, saved=False)

    def of_new_device(self) -> Measurements:
        """The measurements after the node's hardware or software changed: its times no longer
        hold."""
        return replace(self, profiles={}, saved=False) if self.profiles else self


def key_of(profile: ComputeProfile) -> ProfileKey:
    return profile.model_hash, profile.dtype, profile.quantisation


def key_asked(command: MeasureCompute) -> ProfileKey:
    """The key of the profile that a command has measured."""
    return config_hash(command.config), command.dtype, command.quantisation


def check_profile(profile: ComputeProfile) -> None:
    """Raise InvalidArgumentError for a profile without times of some part of a model."""
    fit = fit_profile(profile)
    blocks = (
        LayerKind.MOE_BLOCK
        if any(x.kind is LayerKind.MOE_BLOCK for x in profile.layers)
        else LayerKind.BLOCK
    )
    for kind in (LayerKind.EMBEDDING, blocks, LayerKind.HEAD):
        fit.of_kind(kind)


def same_device(old: DeviceFacts, new: DeviceFacts) -> bool:
    """Whether times measured with the old facts hold with the new; free memory does not matter."""
    return replace(old, memory_budget_bytes=0) == replace(new, memory_budget_bytes=0)


def profiles_for(
    measured: Mapping[NodeId, Measurements], key: ProfileKey
) -> dict[NodeId, ComputeProfile]:
    """The profiles of one model with one sort of weights, by node."""
    profiles = {
        node_id: measurements.profiles.get(key) for node_id, measurements in measured.items()
    }
    return {node_id: profile.value for node_id, profile in profiles.items() if profile is not None}


def disk_of(measurements: Measurements | None) -> DiskProfile | None:
    """A node's disk, from the newest of its profiles with one."""
    profiles = () if measurements is None else measurements.profiles.values()
    newest = max(
        (p for p in profiles if p.value.disk is not None), key=lambda p: p.reported_at, default=None
    )
    return None if newest is None else newest.value.disk


def busy_w_of(measurements: Measurements | None) -> float | None:
    """A node's watts while it computes, from the newest of its profiles with a sensor."""
    profiles = () if measurements is None else measurements.profiles.values()
    newest = max(
        (p for p in profiles if p.value.energy is not None),
        key=lambda p: p.reported_at,
        default=None,
    )
    energy = None if newest is None else newest.value.energy
    return None if energy is None else energy.working_w


def links_of(measured: Mapping[NodeId, Measurements]) -> Iterator[MeasuredLink]:
    for sender, measurements in measured.items():
        for receiver, link in measurements.links.items():
            yield MeasuredLink(sender, receiver, link.value)


def without_nodes(
    measured: Mapping[NodeId, Measurements], node_ids: Iterable[NodeId]
) -> Mapping[NodeId, Measurements]:
    """The measurements without nodes that are no longer known, and without the links to them."""
    removed_ids = frozenset(node_ids)
    if not removed_ids:
        return measured
    return {
        node_id: _without_links(measurements, removed_ids)
        for node_id, measurements in measured.items()
        if node_id not in removed_ids
    }


def _without_links(measurements: Measurements, removed_ids: frozenset[NodeId]) -> Measurements:
    if removed_ids.isdisjoint(measurements.links):
        return measurements
    links = {
        receiver: link
        for receiver, link in measurements.links.items()
        if receiver not in removed_ids
    }
    return replace(measurements, links=links, saved=False)
