"""One seed: a site, its users, and its faults; then a calm in which everything must recover."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import edgeshard_agent.hosting.host
import edgeshard_agent.net.link_sender
import edgeshard_coordinator.control.requests.listeners
import edgeshard_coordinator.control.runtime.planner
from edgeshard_coordinator.control.runtime import node_reports
from edgeshard_coordinator.core.deployments.transitions import next_phase
from edgeshard_coordinator.core.values.state import DeploymentRecord

import edgeshard.architectures.shape
import edgeshard.client.connection
import edgeshard.client.listening
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Epoch, RequestId
from tests.simulator.channel import SimChannel
from tests.simulator.disk import Disk
from tests.simulator.faults import Fates, plan
from tests.simulator.liar import Liar
from tests.simulator.loop import CURRENT, SimFuture, SimTask, VirtualLoop
from tests.simulator.network import Network
from tests.simulator.people import Application, Operator, Visitor
from tests.simulator.site import COORDINATOR, Boss, Node, Troubles
from tests.simulator.watch import Watch

TROUBLED_S = 8.0
"""How long things go wrong."""
CALM_S = 100.0
"""By then everything has come right."""
UNCLAIMED_S = 60.0
"""Seconds for heads to end the answers whose clients do not return. A head answers the requests of
an earlier run of the coordinator to their end. A client may have cancelled one or left while the
coordinator was away."""
QUIET_S = 3.0
"""Seconds after which nothing works any more."""
MOST_STEPS = 400_000


@dataclass
class Outcome:
    seed: int
    violations: list[str]
    met: dict[tuple[str, str, str], int]
    virtual_s: float
    steps: int
    finished: int = 0


class World:
    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        quiet: bool = False,
        lies: bool = False,
    ) -> None:
        self.seed = seed
        self.lies = lies or (not quiet and random.Random(f"lies {seed}").random() < 0.2)
        """Whether a node of the site lies (`tests.simulator.liar`)."""
        self._trace = trace
        self.dice = random.Random(f"world {seed}")
        self.loop = VirtualLoop(random.Random(f"threads {seed}"))
        self.disk = Disk()
        self.watch = Watch(self.disk, lambda: self.loop.now)
        self.fates = Fates(seed, self.watch, quiet, self.lies)
        self.network = Network(
            self.loop, random.Random(f"network {seed}"), self.fates.of, self.note
        )
        self.troubles = Troubles(random.Random(f"troubles {seed}"))
        self.nodes: dict[str, Node] = {}
        self.boss: Boss | None = None
        self.runs = 0
        self.on_another_disk = False
        self.calm_since: float | None = None
        self.apps: list[Application | Visitor] = []
        self.operator: Operator | None = None
        self.specs: list[dict[str, Any]] = []
        self.names: tuple[str, ...] = ()
        self.quiet = quiet
        self.crowded = False
        """Whether many long requests arrive at once, so that some are preempted."""
        self.hybrid = False
        """Whether the first deployment's model keeps states of requests, whose prompts then begin
        alike."""
        self._acknowledged: dict[DeploymentName, Epoch] = {}

    def note(self, what: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.loop.now:9.4f} {what}")

    # Events of processes

    def start_node(self, name: str) -> None:
        self.runs += 1
        self.nodes[name] = Node(
            self.network,
            name,
            self.runs,
            self.watch,
            self.troubles,
            random.Random(f"node {self.seed} {self.runs}"),
        )

    def start_boss(self, disk: Disk | None = None) -> None:
        self.runs += 1
        self.on_another_disk = disk is not None
        dice = random.Random(f"boss {self.seed} {self.runs}")
        self.boss = Boss(self.network, disk or self.disk, self.watch, self.troubles, dice)

    def crash_node(self, name: str, silently: bool) -> None:
        node = self.nodes.pop(name, None)
        if node is not None:
            node.crash(self.network, silently)

    def crash_boss(self, silently: bool) -> None:
        boss, self.boss = self.boss, None
        if boss is not None:
            boss.crash(self.network, silently)

    # Questions of users

    def model_of(self, request_id: RequestId) -> str:
        return str(
            self.specs[sum(map(ord, request_id.rsplit("-", 1)[0])) % len(self.specs)]["name"]
        )

    def acknowledged(self, name: DeploymentName, epoch: Epoch) -> None:
        known = self.disk.deployments.get(name)
        there = known is not None or name in self.disk.retired
        self.watch.hold(there, f"{name} was acknowledged and is not on the disk")

    def delete_acknowledged(self, name: DeploymentName, former: DeploymentRecord | None) -> None:
        """`former` stood when the call was made. The answer may be late, and somebody may have
        deployed it again."""
        known = self.disk.deployments.get(name)
        gone = (
            known is None
            or known.phase is Phase.DELETING
            or (former is not None and known.uid != former.uid)
        )
        self.watch.hold(gone, f"{name} was said to be deleted and stands on the disk")

    def judge(self, request_id: RequestId, error: EdgeShardError, limit: float | None) -> None:
        """An error of a client after its start: its cause must be a real one."""
        name = DeploymentName(self.model_of(request_id))
        assert self.operator is not None
        deleted = name in self.operator.deleted
        causes = {
            "DEADLINE_EXCEEDED": limit is not None,
            "NOT_RECOVERED": self._was_away(name, limit) or deleted,
            "DEPLOYMENT_DELETED": deleted,
            "MODEL_NOT_SERVED": deleted or self.strange,
            "DEPLOYMENT_FAILED": deleted or self.troubles.disk_failed,
            "UNAVAILABLE": limit is not None,
            "DEPLOYMENT_NOT_READY": deleted or limit is not None,
            "LISTENER_LOST": limit is not None,
        }
        # Another deployment of the name may have taken it over, and failed before it was ready.
        real = causes.get(error.reason, deleted)
        self.watch.hold(
            real, f"{request_id} ended with {error.reason} without a cause: {error.message}"
        )

    strange = False
    """Whether the coordinator ever ran on another disk."""

    def _was_away(self, name: DeploymentName, limit: float | None) -> bool:
        """Whether it had no head for the time that a request is parked."""
        least = 29.0 if limit is None else 0.0
        away, since = 0.0, 0.0
        for at, phase in [*self.watch.ready.get(name, []), (self.loop.now, Phase.READY)]:
            if phase is Phase.READY:
                away = max(away, at - since)
            since = at if phase is Phase.READY else since
        return away >= least

    def ended(self, task: asyncio.Task[Any]) -> None:
        """An action of an application or the operator ended in a way that they know."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.watch.violate(f"an application met {error!r}")

    @property
    def all_done(self) -> bool:
        assert self.operator is not None
        if self.operator.busy or any(app.open for app in self.apps):
            return False
        boss = self.boss
        if boss is None:
            return False
        records = boss.coordinator.loop.state.deployments
        ready = all(
            name in records and records[name].phase is Phase.READY for name in self.operator.wanted
        )
        return ready and all(record.phase is Phase.READY for record in records.values())

    # The run

    def begin(self) -> None:
        dice = self.dice
        count = dice.choice((3, 4, 4, 4))
        self.names = ("a", "b", "c", "d")[:count]
        # From dice of its own, whether it is planned, and planned again when its last node has
        # come.
        moves = random.Random(f"moves {self.seed}")
        planned = moves.random() < (1.0 if self.fates.wants("Replan") else 0.15)
        self.start_boss()
        for name in self.names[: -1 if planned else None]:
            self.start_node(name)
        shapes = (
            "a=0:2,b=2:4,c=4:6",
            "a=0:3,b=3:6",
            "a=0:6",
            "b=0:2,a=2:4,c=4:6",
            "a=0:1,b=1:3,c=3:6",
        )
        layers = dice.choice(
            shapes[:2] if self.fates.wants("Link", "suspected", "AttachRequest beacon") else shapes
        )
        base = {"model": "tiny", "dtype": "float32", "max_context": 96, "max_new_tokens": 48}
        places = 4 if self.fates.wants("AttachRequest tokens") else dice.choice((1, 2, 4))
        tale = {
            **base,
            "name": "tale",
            "source": layers[0],
            "layers": layers,
            "concurrency": places,
        }
        if dice.random() < (1.0 if self.fates.wants("standby") else 0.2):
            tale["standby"] = ("auto",)
        self.specs = [
            {**tale, "prefix_cache": dice.random() < 0.3, "kv_overcommit": dice.random() < 0.3}
        ]
        swaps = random.Random(f"swaps {self.seed}")
        self.specs[0] |= {
            "kv_swap_bytes": swaps.choice((0, 1 << 16, 1 << 19)),
            "kv_swap_on_disk": swaps.random() < 0.5,
        }
        self.crowded = swaps.random() < 0.12
        if self.crowded:
            kept = swaps.choice((1 << 16, 1 << 19))
            self.specs[0] |= {"max_context": 80, "concurrency": 1, "kv_swap_bytes": kept}
            # Either way more run than the pool of one context holds at their longest.
            self.specs[0] |= {
                "prompt_tokens": 8,
                "new_tokens": 4,
                "kv_overcommit": swaps.random() < 0.5,
            }
        self._give_states(random.Random(f"hybrids {self.seed}"))
        if planned:
            del self.specs[0]["layers"]
        elif (ruled := random.Random(f"rules {self.seed}")).random() < 0.3:
            held = [part.partition("=")[0] for part in layers.split(",")]
            rules = [f"at-most {len(held)} of {','.join(self.names)}"]
            rules += [
                f"avoid {name}" for name in self.names if name not in held and ruled.random() < 0.5
            ]
            self.specs[0]["rule"] = rules
        if dice.random() < 0.15:
            self.specs.append(
                {**base, "name": "poem", "source": "b", "layers": "b=0:3,c=3:6", "concurrency": 2}
            )
        self.operator = Operator(self, random.Random(f"operator {self.seed}"))
        for spec in self.specs:
            self.operator.process.call_later(dice.uniform(0.3, 1.0), self.operator.deploy, spec)
        if planned:
            self._move_later(moves)
        apps = 3 if self.fates.wants("AttachRequest tokens") else dice.choice((1, 2, 2, 3))
        for number in range(apps):
            asks = random.Random(f"app {self.seed} {number}")
            requests = dice.choice((1, 2, 3, 4))
            self.apps.append(
                Application(self, f"app{number}", asks, 4 if self.crowded else requests)
            )
        looked_at = ("Plan", "List", "Node", "Site", "Models", "Trace", "trace", "Dump", "dump")
        if dice.random() < (1.0 if self.fates.wants(*looked_at) else 0.1):
            self.apps.append(Visitor(self, random.Random(f"visitor {self.seed}")))
        if not self.quiet:
            plan(self)

    def _give_states(self, dice: random.Random) -> None:
        """Sometimes the first deployment's model has states of requests, and a preempted request
        runs again."""
        self.hybrid = dice.random() < 0.3
        if self.hybrid:
            self.specs[0] |= {"model": "hybrid", "prefix_cache": True}
            self.specs[0]["kv_swap_bytes"] *= dice.randrange(2)

    def _move_later(self, dice: random.Random) -> None:
        """The last node joins, and the first deployment is to move there; later the move is
        requested once more."""
        late, at = self.names[-1], dice.uniform(1.2, 3.0)

        def come() -> None:
            if late not in self.nodes:
                self.start_node(late)

        assert self.operator is not None
        self.loop.call_global(at, come, context=Context())
        for delay_s in (dice.uniform(0.1, 1.0), dice.uniform(2.0, 4.5)):
            self.operator.process.call_later(
                at + delay_s, self.operator.replan, DeploymentName("tale")
            )

    def calm(self) -> None:
        """There are no faults from now on, and stopped processes start."""
        self.calm_since = self.loop.now
        if self.troubles.disk_failed and self.operator is not None:
            self.operator.look_after(self.specs)
        self.note("calm")
        self.fates.off = True
        self.troubles.disk = self.troubles.load = 0.0
        self.network.slow.clear()
        for a, b in list(self.network.parted):
            self.network.heal(a, b)
        if self.boss is not None and (self.on_another_disk or self.boss.stopping):
            self.crash_boss(silently=False)
        if self.boss is None:
            self.start_boss()
        for name in self.names:
            if name not in self.nodes:
                self.start_node(name)
        processes = [
            *(node.process for node in self.nodes.values()),
            *(app.process for app in self.apps),
        ]
        if self.operator is not None:
            processes.append(self.operator.process)
        if self.boss is not None:
            processes.append(self.boss.process)
        for process in processes:
            if process.frozen:
                process.thaw()

    def run(self) -> Outcome:
        with _running(self.loop), patched(self):
            self.begin()
            if self.lies:
                Liar(self, COORDINATOR, random.Random(f"liar {self.seed}"))
            self._until(TROUBLED_S, lambda: False)
            if not self.watch.violations:
                self.calm()
                self._until(self.loop.now + CALM_S, lambda: self.all_done)
            if not self.watch.violations:
                self._check_settled()
        return Outcome(
            self.seed,
            self.watch.violations,
            dict(self.watch.met),
            self.loop.now,
            self.loop.steps,
            sum(self.watch.ends.values()),
        )

    def _until(self, when: float, is_over: Callable[[], bool]) -> None:
        violations = self.watch.violations
        loop = self.loop
        count = 0
        while loop.step(when):
            if violations:
                return
            count += 1
            if count % 64 == 0 and is_over():
                return
            if loop.steps > MOST_STEPS:
                self.watch.violate("it goes round in circles")

    def _check_settled(self) -> None:
        hold = self.watch.hold
        assert self.operator is not None
        for app in self.apps:
            hold(not app.open, f"{app.name} waits for an answer after {CALM_S:g} s of calm")
        hold(not self.operator.busy, "the operator waits for the coordinator")
        assert self.boss is not None
        state = self.boss.coordinator.loop.state
        for name in self.operator.wanted:
            record = state.deployments.get(name)
            phase = "nowhere" if record is None else f"{record.phase} ({record.failure})"
            hold(
                record is not None and record.phase is Phase.READY,
                f"{name} is {phase} after {CALM_S:g} s of calm",
            )
        if self.watch.violations:
            return
        self._until(self.loop.now + UNCLAIMED_S, lambda: not self._has_unclaimed)
        self._until(self.loop.now + QUIET_S, lambda: False)
        self._check_empty()

    @property
    def _has_unclaimed(self) -> bool:
        """Whether a head answers a request whose client does not return."""
        heads = [head for node in self.nodes.values() for head in node.hosting._heads.values()]
        entries = [entry for head in heads for entry in head._journal.unfinished()]
        return any(not entry.followed for entry in entries)

    def _check_empty(self) -> None:
        """No client has a request: no stage holds KV, no head and no coordinator a request."""
        hold = self.watch.hold
        assert self.boss is not None
        hold(
            not self.boss.coordinator.front._requests,
            "the coordinator keeps a request that has ended",
        )
        for node in self.nodes.values():
            for stage in node.hosting.stages():
                pool: Any = stage.loaded.model.pool
                hold(
                    not pool.requests,
                    f"a stage on {node.name} keeps KV of requests that have ended",
                )
            for head in node.hosting._heads.values():
                hold(head.is_idle, f"the head on {node.name} is busy with nothing")


@contextmanager
def _running(loop: VirtualLoop) -> Iterator[None]:
    former = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(former)


class _Solver:
    """In place of `control.runtime.solver.Solver`: a thread that takes its time."""

    def __init__(self) -> None:
        self._dice = random.Random(1)

    async def run(self, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._dice.uniform(0.002, 0.05))
        return work()


@contextmanager
def patched(world: World) -> Iterator[None]:
    """The edges of the product: channels, planning threads, and random values."""
    ids = random.Random(f"ids {world.seed}")
    random.seed(world.seed)
    SimTask.count = SimFuture.count = 0

    def open_channel(target: str, *_: object, **__: object) -> SimChannel:
        return SimChannel(world.network, CURRENT.get(), target)

    def watched_phase(phase: Any, trigger: Any) -> Any:
        world.watch.met["transition", str(phase), str(trigger)] = 1
        return next_phase(phase, trigger)

    with ExitStack() as stack:
        for module in (edgeshard_agent.net.link_sender, edgeshard.client.connection):
            stack.enter_context(mock.patch.object(module, "open_channel", open_channel))
        for threads in (edgeshard_coordinator.control.runtime.planner, node_reports):
            stack.enter_context(mock.patch.object(threads, "Solver", _Solver))
        stack.enter_context(
            mock.patch(
                "edgeshard_coordinator.core.deployments.deployments.next_phase", watched_phase
            )
        )
        # The moment at which garbage is looked for must not be part of a run.
        stack.enter_context(
            mock.patch.object(
                edgeshard_agent.hosting.host, "gc", SimpleNamespace(collect=lambda: 0)
            )
        )
        # So that clients tell how far they have read, though answers are short.
        stack.enter_context(mock.patch.object(edgeshard.client.listening, "_TOLD_TOKENS", 4))
        stack.enter_context(
            mock.patch.object(edgeshard_coordinator.control.requests.listeners, "UNREAD_TOKENS", 8)
        )
        # So that states are saved several times in such short texts.
        stack.enter_context(mock.patch.object(edgeshard.architectures.shape, "STEP_TOKENS", 16))
        made = lambda: uuid.UUID(int=ids.getrandbits(128), version=4)  # noqa: E731
        stack.enter_context(mock.patch.object(uuid, "uuid4", made))
        yield
