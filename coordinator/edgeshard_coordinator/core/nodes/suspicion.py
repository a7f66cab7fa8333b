"""Links under suspicion: one of the two nodes is silent, or the link itself is at fault.

A suspicion is remembered for an epoch that is live. Both nodes of the link are checked. If one is
silent, the epoch ends, and the deployment avoids that node. If both continue to send to the
coordinator, the link is at fault: the epoch ends, and for a while the pair of nodes is kept as a
bad link. A node reports its own link and ends an epoch of its own. The other node stays connected,
with its other deployments, until `Timings.heartbeat_timeout_s` of silence.

The coordinator itself suspects heads, on their request streams. A head that is silent on its
control stream, too, is lost, and `reconcile` drops its connection. Any other is left to dial
another request stream. None is lost while the coordinator may be the blind one
(`core.nodes.lost_nodes`).
"""

from __future__ import annotations

from dataclasses import replace

from edgeshard.domain.control.commands import HOLDING_INTERVAL_S, IDLE_INTERVAL_S
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeId
from edgeshard.domain.requests.link import LinkSuspected
from edgeshard_coordinator.core.deployments import deployments
from edgeshard_coordinator.core.nodes import lost_nodes
from edgeshard_coordinator.core.values import authority
from edgeshard_coordinator.core.values.events import HeadReported, LinkReported
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, State, SuspectLink

STOOD_STILL_S = 1.0


def on_link_reported(state: State, event: LinkReported) -> State:
    """The state with a node's report on its link to the next stage. A report that is not of a live
    epoch changes nothing."""
    report = event.suspected
    record, node = state.deployments.get(report.deployment), state.nodes.get(event.node_id)
    if record is None or node is None or not _is_of(record, event):
        return state
    stages = record.placement.stages
    sender, receiver = event.node_id, stages[report.to_stage].node_id
    others = _others(state, report.deployment, report.from_stage, report.to_stage)
    state = replace(state.with_node(replace(node, heard_at=event.now)), suspects=others)
    if report.recovered:
        return state
    suspect = SuspectLink(
        deployment=report.deployment,
        epoch=report.epoch,
        from_stage=report.from_stage,
        to_stage=report.to_stage,
        sender=sender,
        receiver=receiver,
        since=event.now,
        checked_at=event.now,
        why=report.why,
    )
    bad_links = dict(state.bad_links)
    if (sender, receiver) in bad_links:
        bad_links[sender, receiver] = event.now + state.timings.bad_link_s
    return replace(state, suspects=(*others, suspect), bad_links=bad_links)


def on_head_reported(state: State, event: HeadReported) -> State:
    """The state with the coordinator's finding on a head's stream. One that is not of a live epoch
    changes nothing."""
    record = state.deployments.get(event.deployment)
    if record is None or not record.is_live or record.epoch != event.epoch:
        return state
    others = _others(state, event.deployment, 0, 0)
    if event.recovered:
        return replace(state, suspects=others)
    suspect = SuspectLink(
        deployment=event.deployment,
        epoch=event.epoch,
        from_stage=0,
        to_stage=0,
        sender=None,
        receiver=record.head.node_id,
        since=event.now,
        checked_at=event.now,
        why=event.why,
    )
    return replace(state, suspects=(*others, suspect))


def _others(
    state: State, deployment: str, from_stage: int, to_stage: int
) -> tuple[SuspectLink, ...]:
    """The suspicions of other links than this."""
    link = (deployment, from_stage, to_stage)
    return tuple(
        suspect
        for suspect in state.suspects
        if (suspect.deployment, suspect.from_stage, suspect.to_stage) != link
    )


def _is_of(record: DeploymentRecord, event: LinkReported) -> bool:
    """Whether it is of the live epoch, and of a link that begins at the node which reports it."""
    report, stages = event.suspected, record.placement.stages
    return (
        record.is_live
        and record.epoch == report.epoch
        and report.to_stage == (report.from_stage + 1) % len(stages) != report.from_stage
        and authority.may_set(LinkSuspected, "recovered", record, event.node_id, report.from_stage)
    )


def settle(state: State, now: float) -> State:
    """End the epochs whose links are at fault, and forget bad links whose time is over."""
    if any(until <= now for until in state.bad_links.values()):
        state = replace(
            state, bad_links={pair: until for pair, until in state.bad_links.items() if until > now}
        )
    if state.suspects:
        state = forget_stale(state)
        state = replace(state, suspects=tuple(_checked(suspect, now) for suspect in state.suspects))
    for suspect in state.suspects:
        if now < suspect.since + state.timings.suspect_wait_s:
            continue
        if suspect.sender is None:
            state = _of_head(state, suspect, now)
        elif all(_heard_at(state, end) > suspect.since for end in suspect.ends):
            state = _at_fault(state, suspect.sender, suspect, now)
        elif silent := _silent_ends(state, suspect, now):
            state = _without(state, silent, suspect, now)
    return state


def _of_head(state: State, suspect: SuspectLink, now: float) -> State:
    """Forget the suspicion of a head whose node talks; and that of one among too many which are
    silent as it is."""
    connected = [node for node in state.nodes.values() if node.connected]
    silent = [node for node in connected if node.heard_at < suspect.since - _silence_s(state, node)]
    if lost_nodes.too_many(len(silent), len(connected)):
        state = lost_nodes.frozen(state, now)
    elif _heard_at(state, suspect.receiver) <= suspect.since:
        return state
    return replace(state, suspects=_others(state, suspect.deployment, 0, 0))


def _silence_s(state: State, node: KnownNode) -> float:
    """A node that holds nothing sends less often, and its next heartbeat may be due just after this
    check."""
    return state.timings.suspect_silence_s + (
        0.0 if node.stages else IDLE_INTERVAL_S - HOLDING_INTERVAL_S
    )


def _checked(suspect: SuspectLink, now: float) -> SuspectLink:
    """A gap that is longer than any between ticks means that the coordinator received nothing."""
    gap = now - suspect.checked_at
    stood_still = gap if gap > STOOD_STILL_S else 0.0
    return replace(suspect, since=suspect.since + stood_still, checked_at=now)


def _at_fault(state: State, sender: NodeId, suspect: SuspectLink, now: float) -> State:
    record = state.deployments[suspect.deployment]
    bad_links = {**state.bad_links, (sender, suspect.receiver): now + state.timings.bad_link_s}
    state = replace(state, bad_links=bad_links)
    if not (record.is_live and record.epoch == suspect.epoch):
        return state  # Another link of it is at fault too.
    names = [
        record.placement.stages[stage].node_name for stage in (suspect.from_stage, suspect.to_stage)
    ]
    failure = UnavailableError(
        f"the link from node {names[0]} to node {names[1]} stalled ({suspect.why}) while both "
        "nodes answer; check the "
        "network between them",
        field="link",
        reason=deployments.LINK_STALLED,
        retry_after_s=1.0,
    )
    return state.with_record(deployments.broke(state, record, failure, now))


def _without(state: State, silent: list[NodeId], suspect: SuspectLink, now: float) -> State:
    """The state in which the deployment of a link continues without its silent ends."""
    record = state.deployments[suspect.deployment]
    if not (record.is_live and record.epoch == suspect.epoch):
        return state  # Another link of it is at fault too.
    names = " and ".join(
        stage.node_name for stage in record.placement.stages if stage.node_id in silent
    )
    failure = UnavailableError(
        f"node {names} is silent, and its link is stalled ({suspect.why}); check the node and the "
        "network",
        field="node",
        reason=deployments.NODE_LOST,
        retry_after_s=1.0,
    )
    avoiding = replace(record, avoided=record.avoided | frozenset(silent))
    return state.with_record(deployments.broke(state, avoiding, failure, now))


def forget_stale(state: State) -> State:
    """The state without suspicions of epochs that have ended."""
    live = tuple(suspect for suspect in state.suspects if _is_live(state, suspect))
    return state if len(live) == len(state.suspects) else replace(state, suspects=live)


def _is_live(state: State, suspect: SuspectLink) -> bool:
    record = state.deployments.get(suspect.deployment)
    return record is not None and record.is_live and record.epoch == suspect.epoch


def reconnected(state: State, node_id: NodeId) -> State:
    """The state when a node has connected: its links are not bad any more."""
    if not any(node_id in pair for pair in state.bad_links):
        return state
    return replace(
        state,
        bad_links={pair: until for pair, until in state.bad_links.items() if node_id not in pair},
    )


def lost(state: State, now: float) -> frozenset[NodeId]:
    """Heads that are lost because the coordinator receives nothing from them on either stream."""
    heads = [
        suspect
        for suspect in state.suspects
        if suspect.sender is None and now >= state.frozen_until
    ]
    return frozenset(end for suspect in heads for end in _silent_ends(state, suspect, now))


def _silent_ends(state: State, suspect: SuspectLink, now: float) -> list[NodeId]:
    """The ends of a link that are too long silent, from `suspect_wait_s` after the suspicion on."""
    timings = state.timings
    if now < suspect.since + timings.suspect_wait_s:
        return []
    silent = [end for end in suspect.ends if _is_silent(state, end, suspect)]
    if silent or now < suspect.since + timings.suspect_limit_s:
        return silent
    return [min(suspect.ends, key=lambda end: _heard_at(state, end))]


def _is_silent(state: State, node_id: NodeId, suspect: SuspectLink) -> bool:
    return _heard_at(state, node_id) < suspect.since - state.timings.suspect_silence_s


def _heard_at(state: State, node_id: NodeId) -> float:
    node = state.nodes.get(node_id)
    return node.heard_at if node is not None else float("-inf")
