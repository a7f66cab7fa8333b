"""The view of `edgectl top`, as rows of text: made from two consecutive snapshots of the site.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from edgeshard.cli.render.output import Column, human_bytes, human_rate, human_seconds
from edgeshard.cli.render.views import percent
from edgeshard.domain.control.site import Site, StoredLink
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.nodes.device import Node, StagePhase
from edgeshard.views import Look, Rates, node_status

Row = tuple[str, ...]
NONE = "-"
_WORDS = frozenset(
    {"DEPLOYMENT", "FROM", "LAYERS", "NAME", "NODE", "PHASE", "STATE", "STATUS", "TO"}
)
"""Titles of columns of words; all others hold figures."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table of the view: its title, and its columns of a row's texts."""

    title: str
    columns: tuple[Column[Row], ...]


def _shape(title: str, *columns: str) -> TableShape:
    cells: list[Column[Row]] = [
        Column(column, itemgetter(at), right=column not in _WORDS)
        for at, column in enumerate(columns)
    ]
    return TableShape(title, tuple(cells))


DEPLOYMENTS = _shape(
    "Deployments", "NAME", "PHASE", "RUNNING", "WAITING", "TOKENS/S", "SERVED", "EPOCH"
)
STAGES = _shape(
    *("Stages", "DEPLOYMENT", "STAGE", "NODE", "LAYERS", "PHASE"),
    *("TOKENS/S", "STEPS/S", "WAITS", "QUEUE", "KV"),
)
LINKS = _shape("Links", "DEPLOYMENT", "FROM", "TO", "RATE", "LATENCY", "STATE")
NODES = _shape("Nodes", "NODE", "STATUS", "LOAD", "STAGES", "BUDGET", "FREE", "MEMORY LEFT", "SEEN")
SHAPES = (DEPLOYMENTS, STAGES, LINKS, NODES)


def tables(look: Look, before: Look | None) -> tuple[list[Row], ...]:
    """The rows of each of `SHAPES`. Rates are since the look `before`."""
    rates = Rates(look, before)
    return (
        [_deployment(deployment, rates) for deployment in look.deployments],
        [row for deployment in look.deployments for row in _stages(deployment, rates)],
        [row for deployment in look.deployments for row in _links(deployment, look.site)],
        [_node(node) for node in look.site.nodes],
    )


def summary(look: Look) -> str:
    """One line of the whole."""
    there = sum(1 for node in look.site.nodes if node.placeable)
    running, waiting = 0, 0
    for deployment in look.deployments:
        queued = _waiting(deployment)
        running, waiting = running + deployment.active_requests - queued, waiting + queued
    return f"{there} of {len(look.site.nodes)} nodes, {running} requests running, {waiting} waiting"


def _node(node: Node) -> Row:
    busy = [stage.busy_share for stage in node.stages if stage.phase is not StagePhase.STANDBY]
    condition = node.condition
    return (
        node.name,
        node_status(node),
        percent(min(1.0, sum(busy))) if busy else NONE,
        str(len(node.stages)),
        human_bytes(node.facts.memory_budget_bytes),
        human_bytes(node.free_bytes),
        human_bytes(condition.memory_available_bytes) if condition is not None else NONE,
        f"{node.heartbeat_age_s:.1f} s",
    )


def _rate(per_s: float | None) -> str:
    return NONE if per_s is None else f"{per_s:.1f}"


def _waiting(deployment: Deployment) -> int:
    return min(
        deployment.active_requests, sum(stage.requests_waiting for stage in deployment.stages)
    )


def _deployment(deployment: Deployment, rates: Rates) -> Row:
    waiting = _waiting(deployment)
    last = max(deployment.stages, key=lambda stage: stage.stage, default=None)
    return (
        deployment.spec.name,
        deployment.phase.value,
        str(deployment.active_requests - waiting),
        str(waiting),
        _rate(rates.of(last, "tokens_done")) if last is not None else NONE,
        str(deployment.traffic.requests),
        str(deployment.epoch),
    )


def _stages(deployment: Deployment, rates: Rates) -> Iterator[Row]:
    names = [placed.node_name for placed in deployment.placement.stages]
    for stage in sorted(deployment.stages, key=lambda status: status.stage):
        full = stage.kv_bytes_in_use / stage.kv_bytes_capacity if stage.kv_bytes_capacity else 0.0
        yield (
            deployment.spec.name,
            str(stage.stage),
            names[stage.stage] if stage.stage < len(names) else NONE,
            str(stage.layers),
            stage.phase.value,
            _rate(rates.of(stage, "tokens_done")),
            _rate(rates.of(stage, "steps_done")),
            percent(1.0 - stage.busy_share),
            str(stage.steps_waiting),
            percent(full),
        )


def _links(deployment: Deployment, site: Site) -> Iterator[Row]:
    stages = deployment.placement.stages
    stored_links = {(stored.link.sender, stored.link.receiver): stored for stored in site.links}
    for index, sender in enumerate(stages if len(stages) > 1 else ()):
        after = (index + 1) % len(stages)
        receiver = stages[after]
        why = [
            hop.why
            for hop in deployment.suspects
            if (hop.from_stage, hop.to_stage) == (index, after)
        ]
        measured = stored_links.get((sender.node_id, receiver.node_id))
        state = f"suspect: {why[0]}" if why else "carries"
        yield (
            deployment.spec.name,
            sender.node_name,
            receiver.node_name,
            *_figures(measured),
            state,
        )


def _figures(measured: StoredLink | None) -> tuple[str, str]:
    if measured is None:
        return NONE, NONE
    profile = measured.link.profile
    return human_rate(profile.bandwidth_bps), human_seconds(profile.latency_s)
