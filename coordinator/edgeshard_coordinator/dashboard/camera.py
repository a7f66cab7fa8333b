"""The picture of this coordinator's site, made of its newest state."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard import __version__
from edgeshard.domain.control.site import Site
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.views.rates import Look, Rates
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.requests.models import stored_model
from edgeshard_coordinator.control.services.site_views import all_links, node_views
from edgeshard_coordinator.core.values.state import State, deployment_view
from edgeshard_coordinator.dashboard import picture

RATES_OVER_S = 2.0
"""Nodes say what they counted once a second."""
OUTDATED_S = 10.0
"""A look from before nobody looked for so long says nothing of now."""
EVENTS = 100


class Camera:
    """`take` makes a picture. What did not change since the one before is the same object."""

    def __init__(self, site: Coordinator) -> None:
        self._loop, self._front, self._models = site.loop, site.front, site.models
        self._events, self._conditions = site.events, site.conditions
        self._looks: deque[Look] = deque()
        self._links: tuple[object, dict[str, Any]] = (None, {})

    def take(self) -> dict[str, Any]:
        state, now = self._loop.state, self._loop.now()
        nodes = tuple(self._conditions.with_condition(node) for node in node_views(state, now))
        deployments = tuple(self._deployment(state, name) for name in sorted(state.deployments))
        look = Look(now, Site(nodes, (), (), {}), deployments)
        while self._looks and (
            self._looks[0].at_s < now - OUTDATED_S
            or (len(self._looks) > 1 and self._looks[1].at_s <= now - RATES_OVER_S)
        ):
            self._looks.popleft()
        rates = Rates(look, self._looks[0] if self._looks else None)
        self._looks.append(look)
        return {
            "site": {"version": __version__, "instance": state.instance},
            "nodes": picture.nodes_picture(nodes),
            "links": self._links_of(state, {node.node_id: node.name for node in nodes}),
            "deployments": picture.deployments_picture(deployments, rates, self._measured(state)),
            "models": picture.models_picture(stored_model(*found) for found in self._models.list()),
            "events": picture.events_picture(self._events.newest(EVENTS)),
        }

    def _deployment(self, state: State, name: Any) -> Deployment:
        record = state.deployments[name]
        view = deployment_view(state, record, self._front.active_requests(name))
        return replace(view, traffic=self._front.traffic.of(name, record.model))

    def _links_of(self, state: State, names: Mapping[Any, str]) -> dict[str, Any]:
        """Made anew only where a measurement or a node is new: a site of n nodes has n(n-1) links."""
        key = (state.measured, tuple(names.items()))
        known, links = self._links
        if known != key:
            links = picture.links_picture(all_links(state, self._loop.now()), names)
            self._links = (key, links)
        return links

    def _measured(self, state: State) -> dict[str, dict[str, Any]]:
        found = {}
        for name in state.deployments:
            counts = self._front.meter.of(name)
            found[str(name)] = picture.measured_picture(
                counts.first_token,
                counts.between_tokens,
                counts.pauses,
                sum(counts.begun.values()),
                sum(counts.failed.values()),
            )
        return found
