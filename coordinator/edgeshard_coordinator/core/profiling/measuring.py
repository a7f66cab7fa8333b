"""Measurements by the nodes: those that an operator requested, and of links that are not measured
yet.

A job is one node's share: first its layers, then its links in batches of peers. Links are measured
by one node of the site at a time and while no node measures its layers, so that measurements do not
disturb each other. The coordinator's own measurements of links wait until the site has been quiet
for a while, and are one batch long. When no link is left that may be measured, they are followed by
layers that a node lacks (`core.profiling.missing_profiles`).

Layers that a node measured while it was busy with something else are measured again, without a
request, when it is quiet. Nodes that serve are measured last, and only when the site is quiet too.
Profiles from a node with stages, or with only the effort of a first deployment, are taken again
when the node does not serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from edgeshard.domain.control.commands import CommandKey, MeasureCompute, Peer, ProbeLinks
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.errors import DeadlineError, EdgeShardError, NotFoundError, UnavailableError
from edgeshard.domain.ids import Digest, NodeId, NodeName
from edgeshard.domain.nodes.profile import Effort, at_least, config_hash
from edgeshard.planning.inputs.site_cluster import node_starting
from edgeshard.profiles.profile_quality import busy, may_improve
from edgeshard_coordinator.core.profiling import missing_profiles
from edgeshard_coordinator.core.values.actions import Action, SendCommand, TellMeasured
from edgeshard_coordinator.core.values.events import MeasureRequested
from edgeshard_coordinator.core.values.jobs import Job, Measured, ProbeTry, Retake, SentCommand
from edgeshard_coordinator.core.values.measurements import key_asked
from edgeshard_coordinator.core.values.state import KnownNode, State

PEERS_AT_ONCE = 4
"""Links of one command, and so the longest that a site which turns busy has to wait."""
LOOKED_AT = 32
"""Nodes whose missing links are searched in one tick."""
STAGE_CAME, REQUESTS_RAN = "STAGE_CAME", "REQUESTS_RAN"
"""Why a node stops a measurement of layers: a stage is to be loaded there, or requests kept it busy
throughout. It counts as no attempt then."""
_IN_TRANSITION = (Phase.LOADING, Phase.ACTIVATING, Phase.DELETING)


def chosen_nodes(state: State, names: Sequence[str]) -> dict[NodeId, NodeName]:
    """The nodes an operator names, by name or id; every placeable one when none is named.

    Raises NotFoundError or UnavailableError naming `nodes`.
    """
    if not names:
        placeable = [node for node in state.nodes.values() if node.placeable]
        if not placeable:
            starting = next((node for node in state.nodes.values() if node.connected), None)
            if starting is not None:
                raise _not_placeable(starting)
            raise UnavailableError(
                "nodes: no node is connected; start an agent first", field="nodes", reason="NO_NODE"
            )
        return {node.node_id: node.name for node in sorted(placeable, key=lambda node: node.name)}
    nodes = {}
    for name in names:
        node = state.find_node(name)
        if node is None:
            raise NotFoundError(
                f"nodes: there is no node {name[:80]!r}", field="nodes", reason="UNKNOWN_NODE"
            )
        if not node.placeable:
            raise _not_placeable(node)
        nodes[node.node_id] = node.name
    return nodes


# Events


def on_requested(state: State, event: MeasureRequested) -> State:
    """Raises UnavailableError naming the first node that is not connected or still starting."""
    jobs = []
    for node_id in event.node_ids:
        node = state.nodes.get(node_id)
        if node is None:
            raise _away(NodeName(node_id))
        if not node.placeable:
            raise _not_placeable(node)
        jobs.append(
            Job(
                event.uid,
                node_id,
                node.connection,
                compute=event.compute,
                every_link=event.every_link,
            )
        )
    if event.compute is not None:
        configs = {**state.configs, config_hash(event.compute.config): event.compute.config}
        state = replace(state, configs=configs)
    return replace(state, jobs=(*state.jobs, *jobs))


def _not_placeable(node: KnownNode) -> UnavailableError:
    return node_starting("nodes", node.name) if node.connected else _away(node.name)


def _away(name: NodeName) -> UnavailableError:
    return UnavailableError(
        f"nodes: node {name} is not connected; start it, or leave it out",
        field="nodes",
        reason="NODE_AWAY",
    )


def on_sent(state: State, action: SendCommand, now: float) -> State:
    """A measuring command was sent."""
    timings, command = state.timings, action.command
    assert isinstance(command, MeasureCompute | ProbeLinks)
    limit = (
        timings.probe_timeout_s if isinstance(command, ProbeLinks) else timings.measure_timeout_s
    )

    def after(job: Job) -> Job:
        if job.node_id != action.node_id or job.next_key != action.command_key:
            return job
        return replace(
            job, step=job.step + 1, sent=SentCommand(action.command_key, command, now, now + limit)
        )

    return replace(state, jobs=tuple(after(job) for job in state.jobs))


def on_answered(
    state: State, node_id: NodeId, key: CommandKey, failure: EdgeShardError | None, now: float
) -> State:
    """A node's answer to a command; the very same state when it was no measurement, or one that is
    given up."""
    job = next(
        (j for j in state.jobs if j.node_id == node_id and j.sent and j.sent.command_key == key),
        None,
    )
    if job is None or job.sent is None:
        return state
    command = job.sent.command
    if isinstance(command, MeasureCompute):
        state = missing_profiles.ended(state, job, command, _interrupted(failure))
        state = _judged(state, job, command, failure, now)
        following = replace(job, compute=None, sent=None)
    else:
        peer_ids = tuple(peer.node_id for peer in command.peers)
        state = _tried(state, node_id, peer_ids, now)
        missed = frozenset(_not_measured(state, node_id, peer_ids, job.sent.sent_at))
        following = replace(
            job, asked=job.asked | frozenset(peer_ids), missed=job.missed | missed, sent=None
        )
    if failure is not None:
        return _end(state, job, failure)
    return replace(state, jobs=tuple(following if other is job else other for other in state.jobs))


def told(state: State, action: TellMeasured) -> State:
    return replace(state, told=tuple(item for item in state.told if item != action.measured))


def forget_tries(state: State, node_id: NodeId) -> State:
    """Forget a node's tries: it is another process now, and may do what failed before."""
    tries = {}
    for sender, pairs in state.tries.items():
        others = {receiver: one for receiver, one in pairs.items() if receiver != node_id}
        if others and sender != node_id:
            tries[sender] = others
    state = replace(state, tries=tries)
    return missing_profiles.forgotten(state, node_id)


def settle(state: State, now: float) -> State:
    """End the jobs of nodes that went away, jobs unanswered for too long, and jobs with nothing
    left to do."""
    for job in state.jobs:
        node = state.nodes.get(job.node_id)
        if node is None or node.connection != job.connection:
            name = node.name if node is not None else job.node_id
            failure = UnavailableError(
                f"node {name} disconnected while it was measured; measure it again when it is back",
                field="nodes",
                reason="NODE_LOST",
                retry_after_s=1.0,
            )
            state = _end(state, job, failure)
        elif job.sent is not None and now >= job.sent.deadline:
            late = DeadlineError(
                f"node {node.name} did not answer in time; see its log",
                field="nodes",
                reason="NO_ANSWER",
            )
            if isinstance(job.sent.command, ProbeLinks):
                state = _tried(
                    state, job.node_id, [peer.node_id for peer in job.sent.command.peers], now
                )
            state = _end(state, job, late)
        elif job.sent is None and job.compute is None and next(_peers(state, job), None) is None:
            state = _end(state, job, None)
    return state


def on_ticked(state: State, active_requests: int, now: float) -> State:
    """Notice whether the site is busy, and begin a measurement of the coordinator's own.

    It measures unknown links and missing layers when the site has been quiet for long enough. It
    measures layers again that a node measured while busy, with stages or for a first deployment,
    when that node has been quiet: its measuring disturbs no other.
    """
    state = _probing(state, active_requests, now)
    return state if state.jobs else _retaking(state, now)


def restored(state: State, configs: Mapping[Digest, Mapping[str, Any]], now: float) -> State:
    """The state after a restart, with the models that nodes are measured for, of the store's by the
    digests of their manifests.

    Layers that were measured on busy nodes, with stages or for a first deployment are to be
    measured again.
    """
    shapes = {digest: config_hash(config) for digest, config in configs.items()}
    by_hash = {shape: configs[digest] for digest, shape in shapes.items()}
    retakes = [
        Retake(
            node_id,
            _again(MeasureCompute(by_hash[shape], dtype, entry.value.effort, True, quantisation)),
            0,
            now,
        )
        for node_id, measured in state.measured.items()
        for (shape, dtype, quantisation), entry in measured.profiles.items()
        if shape in by_hash and may_improve(entry.value)
    ]
    records = state.deployments.values()
    deployments = {r.name: replace(r, shape=shapes.get(r.manifest_digest, "")) for r in records}
    needed_shapes = {record.shape for record in deployments.values()}
    needed_shapes.update(key[0] for entry in state.measured.values() for key in entry.profiles)
    needed_configs = {shape: config for shape, config in by_hash.items() if shape in needed_shapes}
    return replace(state, retakes=tuple(retakes), deployments=deployments, configs=needed_configs)


def _probing(state: State, active_requests: int, now: float) -> State:
    if active_requests or any(
        record.phase in _IN_TRANSITION for record in state.deployments.values()
    ):
        return replace(state, busy_at=now)
    if state.jobs or now - state.busy_at < state.timings.probe_quiet_s:
        return state
    placeable = sorted(node.node_id for node in state.nodes.values() if node.placeable)
    for offset in range(min(LOOKED_AT, len(placeable))):
        position = (state.probe_turn + offset) % len(placeable)
        sender = placeable[position]
        peers = _missing(state, sender, placeable, now)
        if peers:
            # Nodes take turns, so that one node's links are not all measured before another's.
            return replace(
                missing_profiles.with_own_job(state, sender, peers=peers), probe_turn=position + 1
            )
    measuring = missing_profiles.begun(state, now)
    if measuring is not state and not any(
        _missing(state, sender, placeable, now) for sender in placeable
    ):
        return measuring
    return (
        replace(state, probe_turn=state.probe_turn + LOOKED_AT)
        if len(placeable) > LOOKED_AT
        else state
    )


# Actions


def actions(state: State) -> Iterator[Action]:
    for item in state.told:
        yield TellMeasured(item)
    busy = {job.node_id for job in state.jobs if job.sent is not None}
    probing = any(job.probing for job in state.jobs)
    for job in state.jobs:
        if probing or job.node_id in busy:
            continue
        if job.compute is not None:
            yield SendCommand(job.node_id, job.connection, job.next_key, job.compute)
            busy.add(job.node_id)
        elif not busy:
            peers = tuple(
                _peer(state, node_id) for node_id in nsmallest(PEERS_AT_ONCE, _peers(state, job))
            )
            yield SendCommand(job.node_id, job.connection, job.next_key, ProbeLinks(peers))
            probing = True


def _peers(state: State, job: Job) -> Iterator[NodeId]:
    """The nodes that a job still has to probe, one by one: at every event every job returns its
    first."""
    links = state.links_from(job.node_id)
    for node_id in job.peers if job.peers is not None else state.nodes:
        if node_id in job.asked or node_id == job.node_id or not state.is_placeable(node_id):
            continue
        if job.every_link or node_id not in links:
            yield node_id


def _missing(
    state: State, sender: NodeId, placeable: Sequence[NodeId], now: float
) -> tuple[NodeId, ...]:
    """A batch of the links from a node that may be tried now."""
    links, tries = state.links_from(sender), state.tries.get(sender, {})
    receivers: list[NodeId] = []
    for receiver in placeable:
        if receiver == sender or receiver in links:
            continue
        tried = tries.get(receiver)
        if tried is not None and (
            tried.attempts >= state.timings.probe_attempts or now < tried.not_before
        ):
            continue
        receivers.append(receiver)
        if len(receivers) == PEERS_AT_ONCE:
            break
    return tuple(receivers)


def _peer(state: State, node_id: NodeId) -> Peer:
    node = state.nodes[node_id]
    return Peer(node.node_id, node.name, node.address)


def _judged(
    state: State, job: Job, command: MeasureCompute, failure: EdgeShardError | None, now: float
) -> State:
    """The state after a measurement of layers. It is due again if it was disturbed, up to a limit.
    It is due once more when the node does not serve, if the node held stages or the effort was the
    first."""
    key, measurements = key_asked(command), state.measured.get(job.node_id)
    other_retakes = tuple(
        item
        for item in state.retakes
        if (item.node_id, key_asked(item.command)) != (job.node_id, key)
    )
    before = next((item for item in state.retakes if item not in other_retakes), None)
    if failure is not None:
        if job.own and before is not None and _interrupted(failure):
            return replace(
                state, retakes=(*other_retakes, replace(before, attempts=before.attempts - 1))
            )
        return state
    profile = measurements.profiles.get(key) if measurements is not None else None
    if profile is None or not may_improve(profile.value):
        return replace(state, retakes=other_retakes)
    if not job.own or before is None or not busy(profile.value):
        before = Retake(job.node_id, _again(command), 0, now + state.timings.retake_first_s)
    return replace(state, retakes=(*other_retakes, before))


def _again(command: MeasureCompute) -> MeasureCompute:
    return replace(command, effort=at_least(command.effort, Effort.QUICK), again=True)


def _retaking(state: State, now: float) -> State:
    """Begin with the first that is due, of nodes that do not serve if there is one."""
    serving_nodes = missing_profiles.serving(state)
    for item in sorted(state.retakes, key=lambda item: item.node_id in serving_nodes):
        due = item.attempts < state.timings.retake_attempts and now >= item.not_before
        if due and _left_alone(state, item, item.node_id in serving_nodes, now):
            attempts = item.attempts + 1
            later = replace(
                item,
                attempts=attempts,
                not_before=now + missing_profiles.retake_delay(state, attempts),
            )
            others = tuple(other for other in state.retakes if other is not item)
            measuring = missing_profiles.with_own_job(state, item.node_id, item.command)
            return replace(measuring, retakes=(*others, later))
    return state


def _left_alone(state: State, item: Retake, serves: bool, now: float) -> bool:
    """Whether the node still has that profile and has been quiet for long enough.

    If it serves, the site must be quiet too, and its next profile can only be one taken with
    stages.
    """
    node, measurements = state.nodes.get(item.node_id), state.measured.get(item.node_id)
    profile = None if measurements is None else measurements.profiles.get(key_asked(item.command))
    if node is None or profile is None or not node.placeable:
        return False
    if serves and (not busy(profile.value) or now - state.busy_at < state.timings.probe_quiet_s):
        return False
    return now - node.others_at >= state.timings.retake_quiet_s


def _interrupted(failure: EdgeShardError | None) -> bool:
    return failure is not None and failure.reason in (STAGE_CAME, REQUESTS_RAN)


def _tried(state: State, sender: NodeId, receivers: Sequence[NodeId], now: float) -> State:
    """The state after a probe: links that failed are due again later, after a longer delay each
    time."""
    timings, links = state.timings, state.links_from(sender)
    tries = dict(state.tries.get(sender, {}))
    for receiver in receivers:
        attempts = tries.pop(receiver, ProbeTry(0, 0.0)).attempts
        if receiver not in links:
            delay = min(timings.probe_retry_limit_s, timings.probe_retry_first_s * 2.0**attempts)
            tries[receiver] = ProbeTry(attempts + 1, now + delay)
    others = {node_id: pairs for node_id, pairs in state.tries.items() if node_id != sender}
    return replace(state, tries={**others, sender: tries} if tries else others)


def _not_measured(
    state: State, sender: NodeId, receivers: Sequence[NodeId], since: float
) -> Iterator[NodeId]:
    """The receivers without a link in any report since then."""
    links = state.links_from(sender)
    for receiver in receivers:
        link = links.get(receiver)
        if link is None or link.reported_at < since:
            yield receiver


def _end(state: State, job: Job, failure: EdgeShardError | None) -> State:
    missed = tuple(
        sorted(state.nodes[node_id].name for node_id in job.missed if node_id in state.nodes)
    )
    outcomes = (
        state.told if job.own else (*state.told, Measured(job.uid, job.node_id, failure, missed))
    )
    return replace(
        state, jobs=tuple(other for other in state.jobs if other is not job), told=outcomes
    )
