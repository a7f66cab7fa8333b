"""Measurements, as operators see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from edgeshard.domain.control.site import (
    NodeDetails,
    Site,
    StoredLink,
    StoredProfile,
    UnknownFigures,
    UnknownProfile,
)
from edgeshard.domain.ids import ModelName, NodeId
from edgeshard.domain.models.packed_units import PackedOn
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.profile import MeasuredLink, config_hash
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.core.profiling.missing_profiles import Unknown
from edgeshard_coordinator.core.values.measurements import Measurements, ProfileKey
from edgeshard_coordinator.core.values.state import KnownNode, State, node_view


def node_views(state: State, now: float) -> tuple[Node, ...]:
    """Every node, by name."""
    unknown = Unknown(state)
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    return tuple(_node_view(state, node, unknown, now) for node in nodes)


def node_details(state: State, node: KnownNode, models: Models, now: float) -> NodeDetails:
    """A node, all its profiles, the links from and to it, and its unknown figures."""
    unknown = Unknown(state)
    return NodeDetails(
        node=_node_view(state, node, unknown, now),
        profiles=_profiles(state, [node.node_id], models, lambda key: True, now),
        links=_links(state, lambda link: node.node_id in (link.sender, link.receiver), now),
        unknown=_unknown_figures(state, node, unknown, models),
    )


def _node_view(state: State, node: KnownNode, unknown: Unknown, now: float) -> Node:
    profiles, links = len(unknown.profiles(node)), unknown.link_count(node)
    stored_profiles = state.measured.get(node.node_id, Measurements()).profiles.values()
    return replace(
        node_view(state, node, now),
        unknown_profiles=profiles,
        unknown_links=links,
        measuring=any(job.node_id == node.node_id for job in state.jobs),
        profiles_beside_stages=sum(profile.value.beside_stages for profile in stored_profiles),
    )


def _unknown_figures(
    state: State, node: KnownNode, unknown: Unknown, models: Models
) -> UnknownFigures:
    names = _names(models)
    return UnknownFigures(
        profiles=tuple(
            UnknownProfile(
                tuple(names.get(config_hash(command.config), ())),
                command.dtype,
                command.quantisation,
            )
            for command in unknown.profiles(node)
        ),
        links=tuple(sorted(state.nodes[node_id].name for node_id in unknown.links(node))),
    )


def site_details(state: State, models: Models, model: str, now: float) -> Site:
    """Every node and link, and the profiles of a model in any dtype. Raises NotFoundError for an
    unknown model."""
    nodes = node_views(state, now)
    profiles: tuple[StoredProfile, ...] = ()
    config: Mapping[str, Any] = {}
    digest, packed = "", tuple[PackedOn, ...]()
    if model:
        manifest, digest = models.get(model)
        packed = tuple(
            PackedOn(node.node_id, node.packed) for node in state.nodes.values() if node.packed
        )
        config = manifest.config
        shape = config_hash(config)
        profiles = _profiles(
            state, [node.node_id for node in nodes], models, lambda key: key[0] == shape, now
        )
    return Site(
        nodes=nodes,
        links=all_links(state, now),
        profiles=profiles,
        config=config,
        manifest_digest=digest,
        packed=packed,
    )


def _profiles(
    state: State,
    node_ids: Iterable[NodeId],
    models: Models,
    predicate: Callable[[ProfileKey], bool],
    now: float,
) -> tuple[StoredProfile, ...]:
    names = _names(models)
    return tuple(
        StoredProfile(
            node_id=node_id,
            profile=reported.value,
            models=tuple(names.get(key[0], ())),
            age_s=max(0.0, now - reported.reported_at),
        )
        for node_id in node_ids
        if node_id in state.measured
        for key, reported in state.measured[node_id].profiles.items()
        if predicate(key)
    )


def _names(models: Models) -> dict[str, list[ModelName]]:
    """The models of the store by their shape."""
    names: dict[str, list[ModelName]] = {}
    for manifest, _ in models.list():
        names.setdefault(config_hash(manifest.config), []).append(manifest.name)
    return names


def all_links(state: State, now: float) -> tuple[StoredLink, ...]:
    """Every link that was measured."""
    return _links(state, lambda link: True, now)


def _links(
    state: State, predicate: Callable[[MeasuredLink], bool], now: float
) -> tuple[StoredLink, ...]:
    stored_links = []
    for sender, measurements in state.measured.items():
        for receiver, reported in measurements.links.items():
            link = MeasuredLink(sender, receiver, reported.value)
            if predicate(link):
                stored_links.append(StoredLink(link, max(0.0, now - reported.reported_at)))
    return tuple(stored_links)
