"""News for people of a change of the state: nodes join and leave, deployments change phase, links
carry nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgeshard.domain.control.site import Subject
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard_coordinator.core.profiling.missing_profiles import is_whole
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, State


@dataclass(frozen=True, slots=True)
class SiteNews:
    """An event of the site that has neither number nor time yet."""

    subject: Subject
    name: str
    what: str
    detail: str = ""
    warning: bool = False


_BAD = (DeploymentPhase.WAITING, DeploymentPhase.FAILED)


def news(before: State, after: State) -> Iterator[SiteNews]:
    """The changes between two states, each of a node or a deployment once."""
    if before.nodes is not after.nodes:
        yield from _of_nodes(before, after)
    if before.measured is not after.measured:
        yield from _of_measurements(before, after)
    if before.suspects is not after.suspects:
        yield from _of_links(before, after)
    if before.deployments is not after.deployments:
        yield from _of_deployments(before, after)


def _of_nodes(before: State, after: State) -> Iterator[SiteNews]:
    for node_id, node in after.nodes.items():
        former_node = before.nodes.get(node_id)
        if former_node is not node:
            yield from _of_node(former_node, node)
    for node_id, node in before.nodes.items():
        if node_id not in after.nodes and node.joined:
            yield SiteNews(Subject.NODE, node.name, "removed")


def _of_node(former_node: KnownNode | None, node: KnownNode) -> Iterator[SiteNews]:
    was_connected, was_placeable = (
        (former_node.connected, former_node.placeable)
        if former_node is not None
        else (False, False)
    )
    if node.connected and not was_connected:
        first = former_node is None or not former_node.joined
        yield SiteNews(Subject.NODE, node.name, "joined" if first else "connected", node.address)
    if node.placeable and not was_placeable:
        yield SiteNews(Subject.NODE, node.name, "ready", "layers can be placed on it")
    if was_connected and not node.connected:
        yield SiteNews(
            Subject.NODE,
            node.name,
            "away",
            "its stream closed, or it was silent for too long",
            warning=True,
        )


def _of_measurements(before: State, after: State) -> Iterator[SiteNews]:
    """News when nothing is left to measure on the site; a node whose links arrive one by one makes
    no news for each."""
    changed = [
        node_id
        for node_id, measurements in after.measured.items()
        if before.measured.get(node_id) is not measurements
    ]
    nodes = [after.nodes[node_id] for node_id in changed if node_id in after.nodes]
    if nodes and is_whole(after, nodes) and is_whole(after, after.nodes.values()):
        for node in nodes:
            was = before.measured.get(node.node_id)
            if (
                was is None
                or was.profiles != after.measured[node.node_id].profiles
                or not is_whole(before, [node])
            ):
                yield SiteNews(
                    Subject.NODE, node.name, "measured", "all connected nodes are measured"
                )


def _of_links(before: State, after: State) -> Iterator[SiteNews]:
    for suspect in after.suspects:
        names = [
            after.nodes[end].name if end in after.nodes else end for end in reversed(suspect.ends)
        ]
        ends = names if suspect.sender is not None else ["coordinator", *names]
        if all(
            (former_suspect.sender, former_suspect.receiver) != (suspect.sender, suspect.receiver)
            for former_suspect in before.suspects
        ):
            yield SiteNews(Subject.LINK, " -> ".join(ends), "suspect", suspect.why, warning=True)


def _of_deployments(before: State, after: State) -> Iterator[SiteNews]:
    for name, record in after.deployments.items():
        former_record = before.deployments.get(name)
        if former_record is record:
            continue
        if former_record is None or former_record.uid != record.uid:
            yield SiteNews(
                Subject.DEPLOYMENT, name, "created", f"model {record.model}, {_layers(record)}"
            )
            former_record = None
        yield from _of_deployment(former_record, record)
    for name in before.deployments:
        if name not in after.deployments:
            yield SiteNews(Subject.DEPLOYMENT, name, "deleted")


def _of_deployment(
    former_record: DeploymentRecord | None, record: DeploymentRecord
) -> Iterator[SiteNews]:
    if (
        former_record is not None
        and former_record.placement is not record.placement
        and _layers(former_record) != _layers(record)
    ):
        yield SiteNews(
            Subject.DEPLOYMENT,
            record.name,
            "moved",
            f"from {_layers(former_record)} to {_layers(record)}",
        )
    new_failure = record.failure is not None and (
        former_record is None or former_record.failure != record.failure
    )
    if former_record is not None and former_record.phase is record.phase and not new_failure:
        return
    detail = record.failure.message if record.failure is not None else ""
    if record.phase is DeploymentPhase.READY:
        detail = f"epoch {record.epoch}, {_layers(record)}"
    yield SiteNews(
        Subject.DEPLOYMENT, record.name, record.phase.value, detail, record.phase in _BAD
    )


def _layers(record: DeploymentRecord) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in record.placement.stages)
