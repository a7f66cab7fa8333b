"""The core against simulated nodes and a simulated disk: whatever happens, invariants hold and
everything settles."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from edgeshard_coordinator.core.deployments.deployments import new_record, restored_record
from edgeshard_coordinator.core.machine.apply import apply, machine
from edgeshard_coordinator.core.machine.reconcile import reconcile
from edgeshard_coordinator.core.nodes.lost_nodes import started
from edgeshard_coordinator.core.placement.by_memory import SimplePlacer
from edgeshard_coordinator.core.values.actions import (
    Action,
    DropConnection,
    ForgetDeployment,
    ReleaseOrphans,
    Replan,
    SaveDeployment,
    SaveNode,
    SendCommand,
    TellMeasured,
    TellUnknownStages,
)
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.events import (
    ActionIssued,
    CommandAnswered,
    DeleteRequested,
    DeploymentForgotten,
    DeploymentSaved,
    DeployRequested,
    Event,
    HeadAttached,
    HeadDetached,
    HeartbeatsReceived,
    LinkReported,
    MeasureRequested,
    NodeConnected,
    NodeDisconnected,
    NodeRegistered,
    ProfileReported,
    Replanned,
    SaveFailed,
    Ticked,
)
from edgeshard_coordinator.core.values.state import (
    DeploymentRecord,
    KnownNode,
    ServedOperation,
    State,
    validate_state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.debugging.ring import EventRing
from edgeshard.domain.control.commands import (
    ActivateHead,
    Command,
    CommandResult,
    Heartbeat,
    MeasureCompute,
    PrepareStage,
    ProbeLinks,
    ProfileReport,
    ReleaseStage,
)
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import ExplicitStage, Placement
from edgeshard.domain.errors import DataLossError, EdgeShardError, InternalError, StaleEpochError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange, ModelManifest
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.nodes.profile import Effort, LinkProfile, MeasuredLink
from edgeshard.domain.requests.link import LinkSuspected
from tests.support.forms import in_form, one_in

LINK = LinkProfile(1e-3, 1e9, 0.0, 9, 1 << 20)
NODES = ("a", "b", "c")
NAMES = ("tale", "poem")
KINDS = (
    "connect", "vanish", "restart", "started", "reconnect", "drop", "answer", "answer", "answer",
    "refuse", "replay", "disk", "disk", "disk", "disk fails", "deploy", "delete", "attach",
    "attach", "detach", "heartbeat", "tick", "stall", "measure", "coordinator restarts", "planned",
    "planned", "suspect", "suspect", "recover",
)  # fmt: skip
Step = tuple[str, int]


@dataclass
class Node:
    """An agent according to the contract: its stages, and the commands that reached it and wait for
    an answer."""

    name: str
    incarnation: int = 0
    starting: bool = False
    connection: int = 0
    pending: list[SendCommand] = field(default_factory=list)
    held: dict[DeploymentName, Epoch] = field(default_factory=dict)
    highest: dict[DeploymentName, Epoch] = field(default_factory=dict)
    active: dict[DeploymentName, Epoch] = field(default_factory=dict)

    @property
    def node_id(self) -> NodeId:
        return NodeId(f"id-{self.name}")

    def lose_streams(self) -> None:
        self.connection = 0
        self.pending.clear()

    def die(self) -> None:
        self.lose_streams()
        self.incarnation += 1
        self.held.clear()
        self.active.clear()


def _spread(spec: DeploymentSpec, manifest: ModelManifest, nodes: Sequence[Candidate]) -> Placement:
    """A placement on every node that can serve, so that one of them is lost, late or slow now and
    then."""
    names = sorted(
        (node.name for node in nodes if node.placeable),
        key=lambda name: (name != spec.source, name),
    )
    ends = [12 * number // len(names) for number in range(len(names) + 1)] if names else []
    layers = tuple(
        ExplicitStage(name, LayerRange(*cut))
        for name, cut in zip(names, pairwise(ends), strict=True)
    )
    return SimplePlacer().place(replace(spec, layers=layers), manifest, nodes)


FLOOR = Epoch(1_000)
"""Above all epochs that the coordinator of a test issues."""


class World:
    """Nodes, a disk and the state loop, one step at a time."""

    def __init__(self, manifest: Any, make_registration: Any) -> None:
        self.manifest = manifest
        self.make_registration = make_registration
        self.nodes = {name: Node(name) for name in NODES}
        self.now = 0.0
        self.count = 0
        self.saved: dict[DeploymentName, DeploymentRecord] = {}
        self.retired: dict[DeploymentName, Epoch] = {}
        self.writes: list[SaveDeployment | ForgetDeployment] = []
        self.plans: list[Replan] = []
        self.answers: list[tuple[NodeId, CommandResult]] = []
        self.attachments: dict[DeploymentName, int] = {}
        self.asked: set[tuple[str, NodeId]] = set()
        self.state = State(instance="0", epoch_floor=FLOOR)
        self.rested: State | None = None
        self.strangers: list[TellUnknownStages] = []
        self.ring: EventRing[State, Event] = EventRing(routine=(HeartbeatsReceived, Ticked))

    def number(self) -> int:
        self.count += 1
        return self.count

    def feed(self, event: Event) -> None:
        try:
            self.apply(event)
        except InternalError:
            raise
        except EdgeShardError:
            return
        for _ in range(50):
            actions = reconcile(self.state, self.now, self.rested)
            assert actions == reconcile(self.state, self.now), (
                "something was due of a node that was not looked at"
            )
            if not actions:
                self.rested = self.state
                return
            for action in actions:
                self.apply(ActionIssued(action, self.now))
                self.perform(action)
        raise AssertionError("reconcile does not come to rest")

    def apply(self, event: Event) -> None:
        before = self.state
        try:
            self.state = apply(before, event)
        except EdgeShardError as error:
            self.ring.record(before, event, self.now, error.reason)
            raise
        self.ring.record(before, event, self.now)
        validate_state(self.state)

    def perform(self, action: Action) -> None:
        match action:
            case SendCommand():
                self.send(action)
            case ReleaseOrphans():
                for command in action.commands:
                    self.send(command)
            case TellUnknownStages():
                self.strangers.append(action)
            case SaveDeployment() | ForgetDeployment():
                self.writes.append(action)
            case Replan():
                self.plans.append(action)
            case TellMeasured(measured):
                # Every call gets one report of every node.
                self.asked.remove((measured.uid, measured.node_id))
            case DropConnection():
                for node in self.nodes.values():
                    if node.connection == action.connection:
                        node.lose_streams()
            case _:
                assert not isinstance(action, SaveNode) or action.node.node_id in self.state.nodes

    def send(self, action: SendCommand) -> None:
        node = next(b for b in self.nodes.values() if b.node_id == action.node_id)
        if node.connection == action.connection:
            self.check_sent(node, action.command)
            node.pending.append(action)

    def check_sent(self, node: Node, command: Command) -> None:
        """A node never receives an epoch that is not on disk, nor one below those it saw; a
        starting node receives none.
        """
        assert not node.starting or isinstance(command, ReleaseStage), (
            "a node is asked for work while it starts"
        )
        if isinstance(command, PrepareStage):
            assert self.saved[command.deployment].epoch >= command.epoch
            assert command.epoch >= node.highest.get(command.deployment, 0)
            node.highest[command.deployment] = command.epoch
        if isinstance(command, ActivateHead):
            record = self.state.deployments[command.deployment]
            for stage in record.placement.stages:
                holder = next(b for b in self.nodes.values() if b.node_id == stage.node_id)
                assert holder.held.get(command.deployment) == command.epoch, (
                    "activated before every stage is prepared"
                )

    # Possible events

    def step(self, kind: str, pick: int) -> None:  # noqa: C901 - one line for each kind
        node = self.nodes[NODES[pick % len(NODES)]]
        name = DeploymentName(NAMES[pick % len(NAMES)])
        match kind:
            case "connect" | "reconnect":
                self.connect(node)
            case "vanish":
                self.vanish(node)
            case "restart":
                node.die()
                node.starting = pick % 2 == 0
                self.connect(node)
            case "started":
                self.started(node)
            case "answer" | "refuse":
                self.answer(pick, refuse=kind == "refuse")
            case "replay" if self.answers:
                node_id, result = self.answers[pick % len(self.answers)]
                self.feed(CommandAnswered(node_id, result, self.now))
            case "disk" | "disk fails" if self.writes:
                self.write(self.writes.pop(0), fails=kind == "disk fails")
            case "planned" if self.plans:
                self.planned(self.plans.pop(pick % len(self.plans)))
            case "deploy":
                self.deploy(name)
            case "delete":
                operation = ServedOperation(OperationId(f"op-{self.number()}"), "f", b"")
                self.feed(DeleteRequested(name, operation, self.now))
            case "attach":
                self.attach(name)
            case "detach" if name in self.attachments:
                self.feed(HeadDetached(name, self.attachments.pop(name), self.now))
            case "drop":
                self.drop(node)
            case "heartbeat":
                self.heartbeat(node)
            case "tick":
                self.wait(pick)
            case "stall":
                self.now += pick % 20
                self.feed(Ticked(self.now))
            case "measure":
                uid = f"call{self.number()}"
                compute = (
                    MeasureCompute({}, DType.FLOAT32, effort=Effort.QUICK, again=False)
                    if pick % 2
                    else None
                )
                if self.state.is_placeable(node.node_id):
                    self.asked.add((uid, node.node_id))
                self.feed(MeasureRequested(uid, (node.node_id,), compute, pick % 3 == 0, self.now))
            case "suspect" | "recover" if name in self.state.deployments:
                self.report_link(name, pick, recovered=kind == "recover")
            case "coordinator restarts":
                self.restart()

    def connect(self, node: Node) -> None:
        self.register(node)
        node.pending.clear()
        node.connection = self.number()
        self.feed(NodeConnected(node.node_id, str(node.incarnation), node.connection, self.now))

    def register(self, node: Node) -> None:
        registration = self.make_registration(
            node.name, incarnation=str(node.incarnation), starting=node.starting
        )
        self.feed(NodeRegistered(registration, self.now))

    def started(self, node: Node) -> None:
        """It can compute now, and reports it if a coordinator is connected."""
        node.starting = False
        if node.connection:
            self.register(node)

    def vanish(self, node: Node) -> None:
        connection = node.connection
        node.die()
        self.feed(NodeDisconnected(node.node_id, connection, self.now))

    def drop(self, node: Node) -> None:
        """Its stream ends, and the process continues."""
        connection = node.connection
        node.lose_streams()
        self.feed(NodeDisconnected(node.node_id, connection, self.now))

    def wait(self, pick: int) -> None:
        """Time goes by, tick by tick, and some nodes are silent."""
        for _ in range(2 * (pick % 20)):
            self.now += 0.5
            for number, node in enumerate(self.nodes.values()):
                if pick >> number & 1:
                    self.heartbeat(node)
            self.feed(Ticked(self.now, active_requests=pick % 3))

    def answer(self, pick: int, refuse: bool) -> None:
        waiting = [(node, sent) for node in self.nodes.values() for sent in node.pending]
        if not waiting:
            return
        node, sent = waiting[pick % len(waiting)]
        node.pending.remove(sent)
        failure: EdgeShardError | None = DataLossError("a tensor is corrupt") if refuse else None
        match sent.command:
            case PrepareStage(epoch=epoch) as command:
                if epoch < node.held.get(command.deployment, 0):
                    failure = StaleEpochError("a higher epoch is here")
                elif failure is None:
                    node.held[command.deployment] = epoch
            case ActivateHead(deployment, epoch):
                if failure is None:
                    node.active[deployment] = epoch
                    self.attach(deployment)
            case ReleaseStage(deployment, epoch):
                failure = None
                if node.held.get(deployment, epoch) <= epoch:
                    node.held.pop(deployment, None)
                    node.active.pop(deployment, None)
            case ProbeLinks(peers) if failure is None:
                links = tuple(MeasuredLink(node.node_id, peer.node_id, LINK) for peer in peers)
                self.feed(ProfileReported(ProfileReport(node.node_id, links=links), self.now))
        result = CommandResult(sent.operation_id, failure)
        self.answers.append((node.node_id, result))
        self.feed(CommandAnswered(node.node_id, result, self.now))

    def write(self, action: SaveDeployment | ForgetDeployment, fails: bool) -> None:
        record = action.record
        if fails:
            for each in action.records if isinstance(action, SaveDeployment) else (record,):
                self.feed(
                    SaveFailed(
                        each.name,
                        each.uid,
                        each.revision,
                        InternalError("disk full"),
                        1.0,
                        self.now,
                    )
                )
        elif isinstance(action, SaveDeployment):
            self.saved |= {each.name: each.on_disk for each in action.records}
            for each in action.records:
                self.feed(
                    DeploymentSaved(
                        each.name, each.uid, each.revision, each.on_disk.epoch, self.now
                    )
                )
        else:
            self.saved.pop(record.name, None)
            self.retired[record.name] = record.epoch
            self.feed(DeploymentForgotten(record.name, record.uid, self.now))

    def deploy(self, name: DeploymentName) -> None:
        spec = parse_spec({"name": name, "model": "tiny", "source": "a", "concurrency": 1})
        try:
            placement = _spread(spec, self.manifest, self.state.candidates())
        except EdgeShardError:
            return
        uid = f"u{self.number()}"
        blank = DeploymentRecord(uid, spec, Digest("d" * 64), placement, Epoch(0))
        operation = ServedOperation(OperationId(f"op-{uid}"), "f", b"")
        self.feed(
            DeployRequested(new_record(self.state, blank), self.state.version, operation, self.now)
        )

    def planned(self, asked: Replan) -> None:
        """Plan for the present state, to which the answer refers: the state may have changed when
        it arrives."""
        record = self.state.deployments.get(asked.deployment)
        if record is None:
            return
        found: Placement | EdgeShardError
        try:
            usable = [
                node
                for node in self.state.candidates(record.name)
                if node.node_id not in record.avoided
            ]
            sources = [node.name for node in usable if node.placeable] or [NodeName("a")]
            spec = replace(record.spec, source=sources[0])
            found = _spread(spec, self.manifest, usable)
        except EdgeShardError as error:
            found = error
        self.feed(Replanned(record.name, asked.uid, asked.version, found, self.now))

    def attach(self, name: DeploymentName) -> None:
        for node in self.nodes.values():
            if name in node.active:
                self.attachments[name] = self.number()
                attached = HeadAttached(
                    node.node_id, name, node.active[name], self.attachments[name], self.now
                )
                self.feed(attached)

    def report_link(self, name: DeploymentName, pick: int, recovered: bool) -> None:
        """The node of one of its stages reports the link to the next, for this epoch or the one
        before."""
        record = self.state.deployments[name]
        stages = record.placement.stages
        stage, epoch = pick % len(stages), Epoch(max(1, record.epoch - (pick % 5 == 0)))
        said = LinkSuspected(name, epoch, stage, (stage + 1) % len(stages), recovered, "stalled")
        self.feed(LinkReported(stages[stage].node_id, said, self.now))

    def heartbeat(self, node: Node) -> None:
        if not node.connection:
            return
        stages = tuple(
            StageStatus(name, epoch, 0, LayerRange(0, 1), StagePhase.READY)
            for name, epoch in node.held.items()
        )
        self.feed(
            HeartbeatsReceived(
                (Heartbeat(node.node_id, str(node.incarnation), stages, 0),), self.now
            )
        )

    def restart(self) -> None:
        """The process dies: writes under way are lost, streams end, the disk stays."""
        self.writes.clear()
        self.plans.clear()
        self.attachments.clear()
        self.asked.clear()
        for node in self.nodes.values():
            node.lose_streams()
        deployments = {name: restored_record(record) for name, record in self.saved.items()}
        instance = str(self.number())
        nodes = {node_id: fresh_node(known) for node_id, known in self.state.nodes.items()}
        retired = dict(self.retired)
        self.state = State(
            instance=instance,
            epoch_floor=FLOOR,
            nodes=nodes,
            deployments=deployments,
            retired=retired,
        )
        self.state, self.rested = started(self.state, self.now), None
        self.ring = EventRing(routine=(HeartbeatsReceived, Ticked))

    def calm(self) -> None:
        """From now on everything works; then nothing may be left half done."""
        for node in self.nodes.values():
            self.started(node)
            self.connect(node)
        for _ in range(400):
            while self.writes:
                self.write(self.writes.pop(0), fails=False)
            while self.plans:
                self.planned(self.plans.pop(0))
            if any(node.pending for node in self.nodes.values()):
                self.answer(0, refuse=False)
                continue
            for name, record in list(self.state.deployments.items()):
                if record.phase is Phase.ACTIVATING:
                    self.attach(name)
            for node in self.nodes.values():
                self.heartbeat(node)
            self.now += 1.0
            self.feed(Ticked(self.now))

    def check_replays(self) -> None:
        """A dump taken now, as text, leads to the state there is."""
        document = json.loads(
            json.dumps(machine().document(self.state, self.ring.view(self.state)))
        )
        assert machine().state.decode(document["state"]) == self.state
        replay = machine().replay(document)
        assert not replay.differs and replay.events == len(document["ring"]["entries"])

    def check_settled(self) -> None:
        for record in self.state.deployments.values():
            assert record.phase in (Phase.READY, Phase.FAILED), (
                f"{record.name} is left {record.phase}"
            )
            assert record.durable and not record.operations
            assert self.saved[record.name].phase is record.phase
        assert not self.state.jobs and not self.asked, "a call was never told"
        holders = {name for name, r in self.state.deployments.items() if r.phase is Phase.READY}
        for node in self.nodes.values():
            assert not node.pending
            assert len(self.state.measured[node.node_id].links) == len(NODES) - 1, (
                "its links were never measured"
            )
            assert set(node.held) <= holders, f"node {node.name} holds what is not deployed"
            for name, epoch in node.held.items():
                assert epoch == self.state.deployments[name].epoch


def fresh_node(node: KnownNode) -> KnownNode:
    """As the disk has it."""
    return KnownNode(
        node.node_id, node.name, node.address, node.wire_version, node.facts, saved=True
    )


def run(world: World, steps: Sequence[Step]) -> World:
    for kind, pick in steps:
        world.step(kind, pick)
    world.check_replays()
    world.calm()
    world.check_settled()
    world.check_replays()
    return world


@given(steps=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30)), max_size=40))
@settings(max_examples=in_form(20, 60), deadline=None)
def test_whatever_happens_it_settles(
    make_manifest: Any, make_registration: Any, steps: list[Step]
) -> None:
    run(World(make_manifest(), make_registration), steps)


@pytest.mark.parametrize("seed", one_in(4, range(25)))
def test_long_seeded_runs_settle(make_manifest: Any, make_registration: Any, seed: int) -> None:
    source = random.Random(seed)
    begin: list[Step] = [("connect", 0), ("connect", 1), ("connect", 2), ("deploy", 0)]
    steps = [(source.choice(KINDS), source.randrange(60)) for _ in range(400)]
    world = run(World(make_manifest(), make_registration), [*begin, *steps])
    # Not a run in which nothing happened.
    assert world.count > 40


def test_a_calm_world_serves(make_manifest: Any, make_registration: Any) -> None:
    world = run(
        World(make_manifest(), make_registration),
        [*(("connect", i) for i in range(3)), ("deploy", 0)],
    )
    record = world.state.deployments[DeploymentName("tale")]
    assert record.phase is Phase.READY and record.epoch == 1
    assert [node.held for node in world.nodes.values()] == [{"tale": 1}] * 3


def test_a_coordinator_that_lost_its_disk_goes_above_the_epochs_nodes_hold(
    make_manifest: Any, make_registration: Any
) -> None:
    world = run(
        World(make_manifest(), make_registration),
        [*(("connect", i) for i in range(3)), ("deploy", 0)],
    )
    for node in world.nodes.values():
        node.held = {DeploymentName("tale"): Epoch(FLOOR - 1)}
    world.saved.clear()
    world.restart()
    for node in world.nodes.values():
        world.connect(node)
        world.heartbeat(node)
    world.deploy(DeploymentName("tale"))
    assert world.state.deployments[DeploymentName("tale")].epoch == FLOOR + 1
    assert replace(world.state, nodes={}).first_epoch(DeploymentName("tale")) == 1
    world.calm()
    world.check_settled()


@pytest.mark.parametrize("saved", [Phase.LOADING, Phase.ACTIVATING])
def test_what_may_have_served_is_kept_though_the_disk_did_not_hear_of_it(
    make_manifest: Any, make_registration: Any, saved: Phase
) -> None:
    """The disk has an earlier phase when the coordinator crashes. If it only shows that stages were
    loading, nodes that hold all of them complete it."""
    world = run(
        World(make_manifest(), make_registration),
        [*(("connect", i) for i in range(3)), ("deploy", 0)],
    )
    name = DeploymentName("tale")
    world.saved[name] = replace(world.saved[name], phase=saved, ever_ready=False)
    world.restart()
    assert world.state.deployments[name].ever_ready, (
        "if a node is lost before they do, it must wait for another"
    )
    if saved is Phase.LOADING:
        for index, node in enumerate(world.nodes.values()):
            world.connect(node)
            held = (StageStatus(name, Epoch(1), index, LayerRange(0, 1), StagePhase.READY),)
            world.feed(HeartbeatsReceived((Heartbeat(node.node_id, "0", held, 0),), world.now))
        assert world.state.deployments[name].phase is Phase.ACTIVATING
        world.vanish(world.nodes["c"])
    record = world.state.deployments[name]
    assert record.phase is Phase.WAITING and record.ever_ready


@pytest.mark.parametrize("disk", ["empty", "older"])
def test_a_coordinator_whose_disk_lacks_a_deployment_leaves_its_stages_alone(
    make_manifest: Any, make_registration: Any, disk: str
) -> None:
    """They may be serving for another coordinator, or for this one once it has its disk again."""
    world = run(
        World(make_manifest(), make_registration),
        [*(("connect", i) for i in range(3)), ("deploy", 0)],
    )
    world.saved.clear()
    if disk == "older":  # of before that deployment, when another of its name had been deleted
        world.retired = {DeploymentName("tale"): Epoch(1)}
        for node in world.nodes.values():
            node.held = {DeploymentName("tale"): Epoch(2)}
    world.restart()
    held = [dict(node.held) for node in world.nodes.values()]
    world.calm()
    assert [node.held for node in world.nodes.values()] == held and all(held)
    assert [(told.node_name, told.stages) for told in world.strangers] == [
        (name, tuple(held[number].items())) for number, name in enumerate(NODES)
    ]


def test_what_was_deleted_while_a_node_was_away_is_released_by_the_next_coordinator(
    make_manifest: Any, make_registration: Any
) -> None:
    world = run(
        World(make_manifest(), make_registration),
        [*(("connect", i) for i in range(3)), ("deploy", 0)],
    )
    world.drop(world.nodes["c"])
    world.step("delete", 0)
    while world.state.deployments:
        if world.writes:
            world.write(world.writes.pop(0), fails=False)
        world.answer(0, refuse=False)
    world.restart()
    assert [bool(node.held) for node in world.nodes.values()] == [False, False, True]
    world.calm()
    world.check_settled()
    assert not world.nodes["c"].held and not world.strangers
