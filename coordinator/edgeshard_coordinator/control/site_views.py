"""Measurements, as operators see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edgeshard.domain.ids import ModelName, NodeId
from edgeshard.domain.profile import MeasuredLink, config_hash
from edgeshard.domain.site import NodeDetails, Site, StoredLink, StoredProfile
from edgeshard_coordinator.control.models import Models
from edgeshard_coordinator.core.measurements import ProfileKey
from edgeshard_coordinator.core.state import KnownNode, State, node_view


def node_details(state: State, node: KnownNode, models: Models, now: float) -> NodeDetails:
    """A box, all its profiles, and the links from and to it."""
    return NodeDetails(
        node=node_view(state, node, now),
        profiles=_profiles(state, [node.node_id], models, lambda key: True, now),
        links=_links(state, lambda link: node.node_id in (link.sender, link.receiver), now),
    )


def site_details(state: State, models: Models, model: str, now: float) -> Site:
    """Every box and link, and the profiles of a model in any dtype. Raises NotFoundError for an unknown model."""
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    profiles: tuple[StoredProfile, ...] = ()
    config: Mapping[str, Any] = {}
    if model:
        manifest, _ = models.get(model)
        config = manifest.config
        shape = config_hash(config)
        profiles = _profiles(state, [node.node_id for node in nodes], models, lambda key: key[0] == shape, now)
    return Site(
        nodes=tuple(node_view(state, node, now) for node in nodes),
        links=_links(state, lambda link: True, now),
        profiles=profiles,
        config=config,
    )


def _profiles(
    state: State, node_ids: Iterable[NodeId], models: Models, wanted: Callable[[ProfileKey], bool], now: float
) -> tuple[StoredProfile, ...]:
    names: dict[str, list[ModelName]] = {}
    for manifest, _ in models.list():
        names.setdefault(config_hash(manifest.config), []).append(manifest.name)
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
        if wanted(key)
    )


def _links(state: State, wanted: Callable[[MeasuredLink], bool], now: float) -> tuple[StoredLink, ...]:
    found = []
    for sender, known in state.measured.items():
        for receiver, reported in known.links.items():
            link = MeasuredLink(sender, receiver, reported.value)
            if wanted(link):
                found.append(StoredLink(link, max(0.0, now - reported.reported_at)))
    return tuple(found)
