"""The nodes that keep weights of others' layers in memory, and the commands for it. Pure.

Nothing of it is on disk: after a restart of the coordinator the same choice is made again, and a
node that holds the weights already has nothing to do.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from edgeshard.domain.deployments.deployment import AUTO_STANDBY, DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.rules import RuleCondition, broken
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase
from edgeshard_coordinator.core.deployments.deployments import next_search
from edgeshard_coordinator.core.placement.by_memory import StageSizes
from edgeshard_coordinator.core.placement.ruled import conditions_of
from edgeshard_coordinator.core.values.candidate import Candidate, held_bytes
from edgeshard_coordinator.core.values.events import StandbyPlanned
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    Progress,
    Standby,
    StandbyChoice,
    State,
)


def choose(
    spec: DeploymentSpec,
    placement: Placement,
    candidates: Sequence[Candidate],
    sizes: StageSizes,
    former: Collection[NodeId] = (),
) -> tuple[StandbyChoice, ...]:
    """The standbys for the stages of a placement. The nodes' memory counts the placement, and no
    standby of it, as free.

    Named nodes are used in their order, each for as many stages as fit in its memory. With "auto"
    nodes are taken until every stage has one: spare nodes first, then the `former` ones, then those
    with the most memory. A node with a stage of its own stands by for a neighbouring one: it could
    run those two as one. No node stands by if rules would not let it take over.
    """
    auto = AUTO_STANDBY in spec.standby
    conditions = conditions_of(spec, candidates)
    own = {stage.node_id: stage.index for stage in placement.stages}
    usable = [node for node in candidates if node.placeable and node.name not in spec.exclude]
    rooms = {
        node.node_id: node.free_bytes
        - spec.reserve_of(node.name)
        - (held_bytes(placement.stages[own[node.node_id]]) if node.node_id in own else 0)
        for node in usable
    }
    if auto:
        usable.sort(
            key=lambda node: (
                node.node_id in own,
                node.node_id not in former,
                -rooms[node.node_id],
                node.name,
            )
        )
    else:
        named = {node.name: node for node in usable}
        usable = [named[NodeName(name)] for name in spec.standby if name in named]
    everything = range(len(placement.stages))
    uncovered, choices = set(everything), list[StandbyChoice]()
    for node in usable:
        if not uncovered and auto:
            break
        stage_indices = {
            index
            for index in uncovered or everything
            if _may_take_over(conditions, placement, node.name, index)
        }
        choice = _best_run(node, own.get(node.node_id), stage_indices, rooms, placement, sizes)
        if choice is not None:
            run, layers, reserved = choice
            uncovered -= set(run)
            choices.append(StandbyChoice(node.node_id, node.name, layers, reserved))
    return tuple(choices)


def _may_take_over(
    conditions: Sequence[RuleCondition], placement: Placement, name: NodeName, index: int
) -> bool:
    """Whether rules allow a node in place of a stage's node."""
    others = [stage.node_name for stage in placement.stages if stage.index != index]
    return not broken(conditions, {*others, name})


def _best_run(
    node: Candidate,
    own: int | None,
    stage_indices: set[int],
    rooms: dict[NodeId, int],
    placement: Placement,
    sizes: StageSizes,
) -> tuple[range, LayerRange, int] | None:
    """The longest run of wanted stages that fits."""
    count = len(placement.stages)
    for length in range(count, 0, -1):
        for first in range(count - length + 1):
            run = range(first, first + length)
            if not stage_indices.issuperset(run) or own in run:
                continue
            if own is not None and (length > 1 or abs(own - first) != 1):
                continue
            layers = LayerRange(
                placement.stages[first].layers.first, placement.stages[run[-1]].layers.end
            )
            working = max(_working_bytes(sizes, placement.stages[index].layers) for index in run)
            reserved = sizes.parameter_bytes(layers, node.name) + working
            if reserved <= rooms[node.node_id]:
                return run, layers, reserved
    return None


def _working_bytes(sizes: StageSizes, layers: LayerRange) -> int:
    """Bytes of a stage except its weights."""
    return sizes.kv_bytes(layers) + sizes.workspace_bytes(layers)


def wants_plan(state: State, record: DeploymentRecord) -> bool:
    has_standbys = bool(record.spec.standby or record.standbys)
    return (
        has_standbys
        and record.phase is DeploymentPhase.READY
        and record.standby_for != state.version
    )


def planned(state: State, record: DeploymentRecord, event: StandbyPlanned) -> DeploymentRecord:
    """The record with the standbys that were chosen; a choice of a node that has changed is made
    again."""
    if record.uid != event.uid:
        return record
    record = replace(
        record, searching=False, search_after=next_search(state, event.version, event.now)
    )
    if record.phase is not DeploymentPhase.READY or record.standby_for < 0:
        return record
    if not all(
        state.standby_holds_still(record.name, choice, event.version) for choice in event.chosen
    ):
        return replace(record, standby_for=-1)
    standbys = {
        (entry.node_id, entry.layers): entry
        for entry in record.standbys
        if entry.epoch == record.epoch
    }
    targets: list[tuple[NodeId, LayerRange | None, int]] = [
        (choice.node_id, choice.layers, choice.reserved_bytes) for choice in event.chosen
    ]
    node_ids = {choice.node_id for choice in event.chosen}
    targets += [
        (node_id, None, 0) for node_id in _keepers(state, record) if node_id not in node_ids
    ]
    entries, count = [], record.standby_count
    for node_id, layers, reserved in targets:
        entry = standbys.get((node_id, layers))
        if entry is None:
            # Nodes remember commands by their number, also across runs of the coordinator.
            number = (zlib.crc32(state.instance.encode()) << 20) + count
            entry = Standby(number, node_id, record.epoch, layers, reserved)
            count += 1
        entries.append(entry)
    return replace(record, standbys=tuple(entries), standby_for=event.version, standby_count=count)


def _keepers(state: State, record: DeploymentRecord) -> list[NodeId]:
    """Nodes that keep something for the deployment, or were commanded to."""
    commanded_ids = [entry.node_id for entry in record.standbys if entry.layers is not None]
    reporting_ids = []
    for node_id, node in state.nodes.items():
        standbys = (stage for stage in node.stages if stage.phase is StagePhase.STANDBY)
        if any(stage.deployment == record.name for stage in standbys):
            reporting_ids.append(node_id)
    return list(dict.fromkeys([*commanded_ids, *reporting_ids]))


def due(state: State, record: DeploymentRecord) -> Iterator[Standby]:
    """The standbys whose command is to be sent, over the connection there is now."""
    if record.phase is not DeploymentPhase.READY:
        return
    for entry in record.standbys:
        node = state.nodes.get(entry.node_id)
        if node is None or not node.placeable or entry.epoch != record.epoch:
            continue
        # Over a new connection also what was answered: the node may have restarted, and holds
        # nothing then.
        if entry.sent.sent_on != node.connection:
            yield entry


def sent(record: DeploymentRecord, number: int, connection: int) -> DeploymentRecord:
    return _with(record, number, Progress(connection, False))


def answered(record: DeploymentRecord, number: int, *, failed: bool) -> DeploymentRecord:
    """The record after a node's answer. A command that failed is not sent again over this
    connection; the node's log has the reason."""
    entry = next((entry for entry in record.standbys if entry.number == number), None)
    if entry is None or failed:
        return record
    return _with(record, number, replace(entry.sent, done=True))


def _with(record: DeploymentRecord, number: int, progress: Progress) -> DeploymentRecord:
    entries = (
        replace(entry, sent=progress) if entry.number == number else entry
        for entry in record.standbys
    )
    return replace(record, standbys=tuple(entries))
