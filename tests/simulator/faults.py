"""The faults of a run, decided by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING

from edgeshard_coordinator.core.values.events import Event, HeadAttached

from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.ids import DeploymentName
from tests.simulator.coverage import MESSAGES, WAYS
from tests.simulator.disk import Disk
from tests.simulator.loop import Process
from tests.simulator.watch import Watch

if TYPE_CHECKING:
    from tests.simulator.world import World

_SELDOM_MET = (
    "ControlResponse trace",
    "TraceResponse",
    "ControlRequest suspected",
    "ControlResponse standby",
)
"""These come only if something else went wrong, or in a deployment that is ready: half the seeds
for them see none."""
TARGETS = [
    (kind, way) for kind in (*MESSAGES, *_SELDOM_MET) for way in WAYS if way not in MESSAGES[kind]
]

SELDOM = (
    "AttachRequest beacon",
    "suspected",
    "Delete",
    "Deploy",
    "Cancel",
    "cancel",
    "List",
    "Plan",
    "Replan",
    "GetNode",
    "GetSite",
    "race",
    "ump",
    "failed",
    "finished",
    "hello",
    "listener",
    "Register",
)


class Fates:
    """The fates of messages: each seed has three kinds that meet a given end, and some have others
    in addition."""

    def __init__(self, seed: int, watch: Watch, quiet: bool, lies: bool = False) -> None:
        self.off = quiet
        self._lies = lies
        self._dice = random.Random(f"fates {seed}")
        self._watch = watch
        self._targets = {TARGETS[seed * apart % len(TARGETS)] for apart in (1, 31, 47)}
        left = 1 if self.wants(*SELDOM) else self._dice.choice((1, 1, 2, 3, 6))
        self._left = dict.fromkeys(self._targets, left)
        self._drop = self._dice.choice((0.0, 0.0, 0.0005, 0.003))
        self._twice = self._dice.choice((0.0, 0.0, 0.002, 0.02))

    def wants(self, *kinds: str) -> bool:
        """Whether the seed is for a kind of message that begins so, or has this in it."""
        return any(kind in target for target, _ in self._targets for kind in kinds)

    def of(self, kind: str, again: bool) -> str:
        """`again` asks whether the request of a call comes once more, later; else a message on a
        stream is sent."""
        met = self._watch.met
        if self._lies and kind not in MESSAGES:
            return ""  # of the liar; it is sent in no other run
        met["message", kind, "sent"] = 1
        if self.off:
            return ""
        way = self._chosen(kind, again)
        if way:
            met["message", kind, way] = 1
        return way

    def _chosen(self, kind: str, again: bool) -> str:
        is_call = kind in MESSAGES and "call" in MESSAGES[kind]
        for way in WAYS:
            if (kind, way) in self._left and (way == "twice" and is_call) == again:
                self._left[kind, way] -= 1
                if self._left[kind, way] == 0:
                    return way
        if again:
            return "twice" if self._dice.random() < self._twice else ""
        draw = self._dice.random()
        if draw < self._drop:
            return "drop"
        refused = is_call or "twice" in MESSAGES.get(kind, {"twice": ""})
        return "twice" if not refused and draw > 1.0 - self._twice else ""


class Plan:
    """Faults at times. Each ends by itself, or with the calm."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dice = random.Random(f"plan {world.seed}")
        self._nobody = Context()
        """The context of no process."""
        self.kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "node crashes": (5, self.node_crashes),
            "coordinator crashes": (4, self.coordinator_crashes),
            "coordinator stops": (1, self.coordinator_stops),
            "stall": (4, self.stall),
            "head stalls": (1, self.head_stalls),
            "partition": (4, self.partition),
            "reset": (4, self.reset),
            "clock jumps": (2, self.clock_jumps),
            "disk fails": (3, self.disk_fails),
            "load fails": (2, self.load_fails),
            "step fails": (2, self.step_fails),
            "slow": (2, self.slow),
            "another disk": (1, self.another_disk),
            "delete": (2, self.delete),
            "client crashes": (1, self.client_crashes),
            "a link is cut": (2, self.cut_link),
            "head crashes": (1, self.head_crashes),
            "another stage crashes": (1, self.stage_crashes),
            "head and coordinator crash": (1, self.both_crash),
            "head is lost": (1, self.lose_head),
            "head streams end": (1, self.end_head_streams),
        }

    def make(self) -> None:
        names = list(self.kinds)
        weights = [self.kinds[name][0] for name in names]
        for _ in range(self.dice.choice((0, 1, 2, 3, 5, 8))):
            name = self.dice.choices(names, weights)[0]
            self.at(self.dice.uniform(0.2, 7.5), name, self.kinds[name][1])
        if self.world.fates.wants("Delete", "ControlResponse release"):
            self.at(self.dice.uniform(1.5, 6.0), "delete", self.delete)
        if self.world.fates.wants("ControlRequest suspected"):
            self.at(self.dice.uniform(1.5, 4.0), "a link is cut", self.cut_link)
        self.direct()
        self.aim()

    def aim(self) -> None:
        """Amid answers: after a number of tokens, something happens within moments."""
        names = (
            *(
                "head crashes",
                "head crashes",
                "another stage crashes",
                "another stage crashes",
                "coordinator crashes",
            ),
            *(
                "head and coordinator crash",
                "step fails",
                "reset",
                "head streams end",
                "coordinator stops",
            ),
            *("a link is cut", "stall", "head stalls"),
        )
        aims = {
            self.dice.choice((1, 2, 3, 5, 9, 14, 20)): self.dice.choice(names)
            for _ in range(self.dice.choice((0, 1, 2, 2)))
        }
        if self.world.fates.wants("AttachRequest beacon"):
            # A head sends one if no token arrived for a while.
            aims |= dict.fromkeys((1, 4), "a link is cut")

        def came(count: int) -> None:
            if (name := aims.pop(count, None)) is not None:
                delay_s = self.dice.choice((0.0, 0.0005, 0.003, 0.02))
                self.at(delay_s, f"{name} behind token {count}", self.kinds[name][1])

        self.world.watch.on_token = came

    def direct(self) -> None:
        """When a deployment comes into a phase, for the first time or a later one, something
        happens within moments."""
        phase = self.dice.choice(list(Phase))
        names = [
            *(name for name in self.kinds if name not in ("clock jumps", "slow", "client crashes")),
            "disk fails",
        ]
        name = self.dice.choice([*names, "delete", "reset", "head is lost"])
        if phase is Phase.ACTIVATING and self.dice.random() < 0.4:
            name = self.dice.choice(("node crashes", "head streams end"))
        if phase is Phase.FAILED:
            self.at(0.2, "load fails", self.load_fails)
            name = self.dice.choice((name, "disk fails"))
        if phase is Phase.DELETING:
            self.at(self.dice.uniform(1.5, 5.0), "delete", self.delete)
        left = self.dice.choice((1, 1, 1, 2))
        delay_s = self.dice.choice((0.0, 0.001, 0.004, 0.007, 0.01, 0.05))

        def entered(_: DeploymentName, entered: Phase) -> None:
            nonlocal left
            if entered is phase and (left := left - 1) == 0:
                self.at(delay_s, f"{name} when {phase}", self.kinds[name][1])

        self.world.watch.on_phase = entered
        if self.dice.random() < 0.05:
            self.world.watch.on_event = self._heard

    def _heard(self, event: Event) -> None:
        """Between a head's stream and the answer to its activate there is hardly a moment."""
        if isinstance(event, HeadAttached):
            self.world.watch.on_event = lambda event: None
            self.at(0.0002, "head streams end at once", self.end_head_streams)

    def lose_head(self) -> None:
        """A link is cut and, when its node is about to say so, the head's stream ends."""
        self.cut_link()
        self.at(1.95, "head streams end", self.end_head_streams)

    def end_head_streams(self) -> None:
        for connection in list(self.world.network.connections):
            if any(call.method.path.endswith("/Attach") for call in connection.calls.values()):
                connection.break_off("Connection reset by peer", 0.0, 0.0)

    def cut_link(self) -> None:
        """Between two nodes of a placement, which can still reach the coordinator."""
        boss, network = self.world.boss, self.world.network
        records = () if boss is None else tuple(boss.coordinator.loop.state.deployments.values())
        for record in records:
            names = [stage.node_name for stage in record.placement.stages]
            if len(names) > 1:
                a, b = names[:2]
                network.part(a, b, both=True)
                self.at(
                    self.dice.choice((2.6, 6.0)),
                    f"{a} and {b} hear each other",
                    partial(network.heal, a, b),
                )
                return

    def at(self, delay_s: float, what: str, act: Callable[[], None]) -> None:
        world = self.world

        def happen() -> None:
            if world.calm_since is None:
                world.note(f"fault: {what}")
                act()

        world.loop.call_global(world.loop.now + delay_s, happen, context=self._nobody)

    def _processes(self) -> list[Process]:
        world = self.world
        found = [
            *(node.process for node in world.nodes.values()),
            *(app.process for app in world.apps),
        ]
        return found if world.boss is None else [*found, world.boss.process]

    def _process(self) -> Process:
        return self.dice.choice(self._processes())

    def node_crashes(self) -> None:
        world, name = self.world, self.dice.choice(self.world.names)
        world.crash_node(name, silently=self.dice.random() < 0.5)
        self.at(self.dice.choice((0.3, 1.0, 4.0)), f"{name} is back", lambda: self._node_back(name))

    def _node_back(self, name: str) -> None:
        if name not in self.world.nodes:
            self.world.start_node(name)

    def head_crashes(self) -> None:
        """The node of a deployment's head."""
        self._stage_crashes(is_head=True)

    def stage_crashes(self) -> None:
        """The node of another stage of a deployment."""
        self._stage_crashes(is_head=False)

    def _stage_crashes(self, is_head: bool) -> None:
        boss = self.world.boss
        records = () if boss is None else tuple(boss.coordinator.loop.state.deployments.values())
        if records:
            stages = self.dice.choice(records).placement.stages
            name = str((stages[0] if is_head else stages[-1]).node_name)
            self.world.crash_node(name, silently=self.dice.random() < 0.5)
            self.at(
                self.dice.choice((0.3, 1.0, 4.0)), f"{name} is back", lambda: self._node_back(name)
            )

    def both_crash(self) -> None:
        self.head_crashes()
        self.coordinator_crashes()

    def coordinator_crashes(self) -> None:
        self.world.crash_boss(silently=self.dice.random() < 0.3)
        self.at(self.dice.choice((0.1, 0.5, 3.0)), "the coordinator is back", self._boss_back)

    def _boss_back(self) -> None:
        if self.world.boss is None:
            self.world.start_boss()

    def coordinator_stops(self) -> None:
        boss = self.world.boss
        if boss is None or boss.process.frozen:
            return
        boss.stop()

        def ended() -> None:
            if self.world.boss is boss:
                self.world.crash_boss(silently=False)

        self.at(2.0, "the coordinator has stopped", ended)
        self.at(self.dice.uniform(2.1, 3.0), "the coordinator is back", self._boss_back)

    def another_disk(self) -> None:
        """Once: with two at a time, the first one's end would let the operator continue at the
        second."""
        world = self.world
        if world.strange:
            return
        world.strange = True
        world.crash_boss(silently=False)
        assert world.operator is not None
        operator = world.operator.process
        operator.freeze()  # a later deployment there is another one
        self.at(0.2, "the coordinator is back on another disk", lambda: self._on_another(Disk()))
        back = self.dice.uniform(1.0, 4.0)
        self.at(back, "the other coordinator crashes", lambda: world.crash_boss(silently=False))
        self.at(back + 0.3, "the coordinator is back on its disk", self._boss_back)
        self.at(back + 0.31, "the operator goes on", operator.thaw)

    def _on_another(self, disk: Disk) -> None:
        if self.world.boss is None:
            self.world.start_boss(disk)

    def stall(self) -> None:
        self._stall(self._process())

    def head_stalls(self) -> None:
        """Its neighbours notice it or, if it has none, the coordinator."""
        boss = self.world.boss
        records = () if boss is None else tuple(boss.coordinator.loop.state.deployments.values())
        heads = [
            node
            for record in records
            if (node := self.world.nodes.get(str(record.head.node_name))) is not None
        ]
        if heads:
            self._stall(self.dice.choice(heads).process)

    def _stall(self, process: Process) -> None:
        if not process.frozen:
            process.freeze()
            self.world.note(f"{process.name} stands still")
            self.at(
                self.dice.choice((0.2, 0.8, 1.7, 3.0, 5.0)), f"{process.name} goes on", process.thaw
            )

    def partition(self) -> None:
        a, b = self.dice.sample(sorted({process.name for process in self._processes()}), 2)
        if self.dice.random() < 0.5:
            b = "coordinator" if a != "coordinator" else b
        network = self.world.network
        network.part(a, b, both=self.dice.random() < 0.7)
        self.at(
            self.dice.choice((0.3, 1.5, 2.4, 5.0)),
            f"{a} and {b} hear each other",
            lambda: network.heal(a, b),
        )

    def reset(self) -> None:
        for connection in self.dice.sample(
            self.world.network.connections, min(2, len(self.world.network.connections))
        ):
            # A process that hears nothing notices it by the keepalive.
            ends = self.dice.choice(((0.0, 0.01), (0.0, 2.3), (2.3, 0.0)))
            connection.break_off("Connection reset by peer", *ends)

    def clock_jumps(self) -> None:
        process = self._process()
        process.jump(self.dice.choice((0.4, 2.0, 7.0, 20.0)))
        self.world.note(f"the clock of {process.name} jumps")

    def disk_fails(self) -> None:
        self.world.troubles.disk = self.dice.choice((0.3, 1.0))
        self.at(
            self.dice.uniform(0.2, 2.5),
            "the disk works",
            lambda: setattr(self.world.troubles, "disk", 0.0),
        )

    def load_fails(self) -> None:
        self.world.troubles.load = 0.5
        self.at(
            self.dice.uniform(0.5, 2.5),
            "loading works",
            lambda: setattr(self.world.troubles, "load", 0.0),
        )

    def step_fails(self) -> None:
        node = self.world.nodes.get(self.dice.choice(self.world.names))
        for stage in () if node is None else node.hosting.stages():
            model: object = stage.loaded.model
            setattr(model, "broken", True)  # noqa: B010 - of the simulator's own class

    def slow(self) -> None:
        a, b = self.dice.sample((*self.world.names, "coordinator"), 2)
        slow = self.world.network.slow
        slow[a, b] = self.dice.choice((0.03, 0.3, 1.0))
        self.at(
            self.dice.uniform(0.5, 3.0),
            f"{a} to {b} is as usual",
            partial(slow.__setitem__, (a, b), 0.0),
        )

    def delete(self) -> None:
        world = self.world
        assert world.operator is not None
        spec = self.dice.choice(world.specs)
        name = DeploymentName(spec["name"])
        if name in world.operator.wanted:
            world.operator.delete(name, spec)
        elif name in world.operator.deleted:
            world.operator.delete(name, None)  # somebody else does, too

    def client_crashes(self) -> None:
        app = self.dice.choice(self.world.apps)
        app.process.crash()
        self.world.network.crashed(app.process, silently=False)
        app.open = 0


def plan(world: World) -> None:
    Plan(world).make()
