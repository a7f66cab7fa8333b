"""The picture of this coordinator's site, made of its newest state and the waiting times of the
requests of the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from edgeshard import __version__
from edgeshard.architectures import parse_config
from edgeshard.domain.control.site import Site
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import weights_text
from edgeshard.domain.models.model import ModelManifest
from edgeshard.metrics.histogram import Histogram
from edgeshard.views import Look, Rates
from edgeshard_coordinator.additions.adder import ModelAdder
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.requests.request_meter import DeploymentCounts
from edgeshard_coordinator.control.requests.site_models import max_context, stored_model
from edgeshard_coordinator.control.services.site_views import all_links, node_views
from edgeshard_coordinator.core.values.state import State, deployment_view
from edgeshard_coordinator.dashboard import picture

RECENT_S = 60.0
KEPT_EVERY_S = 5.0
MADE_EVERY_S = 1.0
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_Kept = tuple[tuple[int, ...], tuple[int, ...]]
_NOTHING: _Kept = ((), ())


class Recent:
    """Percentiles of the times to the first token and between tokens, by deployment, of the last
    `RECENT_S` seconds, or since there are viewers if that is less."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, dict[str, _Kept]]] = deque()
        self._made_s = float("-inf")
        self._made: dict[str, dict[str, Any]] = {}

    def of(
        self, now: float, counts: Mapping[str, DeploymentCounts]
    ) -> Mapping[str, dict[str, Any]]:
        """Those of a deployment that had no token are {}."""
        if now - self._made_s < MADE_EVERY_S and self._made.keys() == counts.keys():
            return self._made
        while self._kept and self._kept[0][0] < now - RECENT_S - KEPT_EVERY_S:
            self._kept.popleft()
        if not self._kept or self._kept[-1][0] <= now - KEPT_EVERY_S:
            self._kept.append((now, {name: _kept(one) for name, one in counts.items()}))
        former = self._kept[0][1]
        self._made_s = now
        self._made = {
            name: _recent(one, former.get(name, _NOTHING)) for name, one in counts.items()
        }
        return self._made


def percentiles(figures: Histogram, before: tuple[int, ...] = ()) -> dict[str, float] | None:
    """Percentiles of all figures, or of those since `before`, in their unit; None if there are
    none."""
    quantiles = {name: figures.quantile(share, before) for name, share in SHARES.items()}
    return {name: round(value, 5) for name, value in quantiles.items() if value is not None} or None


def _kept(counts: DeploymentCounts) -> _Kept:
    return counts.first_token.counts(), counts.between_tokens.counts()


def _recent(counts: DeploymentCounts, former: _Kept) -> dict[str, Any]:
    if any(now < then for now, then in zip(counts.first_token.counts(), former[0], strict=False)):
        former = _NOTHING  # another deployment of that name
    first = percentiles(counts.first_token, former[0])
    between = percentiles(counts.between_tokens, former[1])
    return {
        name: value
        for name, value in (("first_token", first), ("between_tokens", between))
        if value is not None
    }


RATES_OVER_S = 2.0
"""Nodes report their counters once a second."""
OUTDATED_S = 10.0
"""A snapshot older than this is no measure of the present."""
EVENTS = 100


class Camera:
    """`take` makes a picture. A part that did not change since the one before is the same object.
    `name` is the site's in certificates, None in plaintext; `began_at` is when the coordinator
    began, in seconds since 1970. `adder` adds models; None without an adder."""

    def __init__(
        self,
        site: Coordinator,
        name: str | None = None,
        began_at: float = 0.0,
        adder: ModelAdder | None = None,
    ) -> None:
        self._name = name
        self._began_at = began_at
        self._keys = site.keys
        self._loop = site.loop
        self._front = site.front
        self._models = site.models
        self._events, self._conditions = site.events, site.conditions
        self._adder = adder
        self._looks: deque[Look] = deque()
        self._recent = Recent()
        self._kept: dict[str, tuple[object, dict[str, Any]]] = {}

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
        counts = {str(name): self._front.meter.of(name) for name in state.deployments}
        measured = {name: picture.measured_picture(one) for name, one in counts.items()}
        recent = self._recent.of(now, counts)
        contexts = {
            name: max_context(record, self._models) for name, record in state.deployments.items()
        }
        return {
            "site": self._site_of(state),
            "nodes": picture.nodes_picture(nodes),
            "links": self._links_of(state, {node.node_id: node.name for node in nodes}),
            "deployments": picture.deployments_picture(deployments, rates, measured, recent),
            "requests": picture.requests_picture(self._front.running(), now, contexts),
            "models": self._models_now(),
            "adding": self._adding_now(),
            "events": self._events_now(),
        }

    def _unless_known(
        self, part: str, key: object, make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A part of the picture that is what it was while its key is."""
        former_key, view = self._kept.get(part, (None, {}))
        if former_key != key:
            view = make()
            self._kept[part] = key, view
        return view

    def _site_of(self, state: State) -> dict[str, Any]:
        keys = 0 if self._keys is None else self._keys.count
        return self._unless_known(
            "site",
            (state.instance, keys),
            lambda: picture.known(
                version=__version__,
                instance=state.instance,
                name=self._name,
                began_at=self._began_at,
                keys=keys,
            ),
        )

    def _models_now(self) -> dict[str, Any]:
        models = self._models.list()
        key = tuple((manifest.name, digest) for manifest, digest in models)
        return self._unless_known("models", key, lambda: _models(models))

    def _adding_now(self) -> dict[str, Any]:
        """The additions of models, and the sources that are allowed."""
        adder = self._adder
        if adder is None:
            return {}
        return self._unless_known(
            "adding",
            adder.state,
            lambda: {
                "folders": [str(folder) for folder in adder.folders.folders],
                "hub": adder.allow_hub,
                "additions": picture.additions_picture(adder.state.by_number.values()),
            },
        )

    def _events_now(self) -> dict[str, Any]:
        newest = self._events.newest(EVENTS)
        key = newest[-1].number if newest else 0
        return self._unless_known("events", key, lambda: picture.events_picture(newest))

    def _deployment(self, state: State, name: Any) -> Deployment:
        record = state.deployments[name]
        view = deployment_view(state, record, self._front.active_requests(name))
        return replace(view, traffic=self._front.traffic.of(record.served_name, record.model))

    def _links_of(self, state: State, names: Mapping[Any, str]) -> dict[str, Any]:
        """A site of n nodes has n(n-1) links."""
        return self._unless_known(
            "links",
            (state.measured, tuple(names.items())),
            lambda: picture.links_picture(all_links(state, self._loop.now()), names),
        )


def _models(models: Iterable[tuple[ModelManifest, Digest]]) -> dict[str, Any]:
    stored = [(stored_model(*one), parse_config(one[0].config).stored_as) for one in models]
    formats = {str(model.name): weights_text(model.dtype, stored_as) for model, stored_as in stored}
    return picture.models_picture((model for model, _ in stored), formats)
