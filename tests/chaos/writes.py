"""The coordinator is killed around each of its writes, and must come back with all that it acknowledged.

    python -m tests.chaos.writes [--only TEXT] [--keep DIR]

Two boxes serve one deployment all the time, two more have another one, which goes through a life: it is deployed, loses
boxes, goes on, is deleted. In each case the coordinator is killed right before or right behind one write, and started
again. Then it must answer soon and know what it had acknowledged; the deployment that has nothing to do with it must
keep its epoch, and its request the tokens of an undisturbed run; and so must the requests of the one that goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from edgeshard import Client
from edgeshard.domain.deployment import DeploymentPhase as Phase
from edgeshard.domain.errors import EdgeShardError, NotFoundError, UnavailableError
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1.admin_pb2_grpc import AdminServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.wire.deployment import spec_to_wire
from edgeshard.wire.status import from_rpc_error
from edgeshard_coordinator.core.transitions import Trigger
from tests.chaos.checker import Reference, check, reference_of
from tests.chaos.failpoints import OF_SAVES, Action, Failpoint, Place
from tests.chaos.matrix import Ask
from tests.chaos.site import COORDINATOR, DEMO_MODEL, MODEL, ChaosSite, spec
from tests.chaos.trial import Stream

BOXES = ("a", "b", "c", "d", "e")
STEADY, TRIED, OTHER_MODEL = "steady", "tried", "other-tales"
"""Deployments: one on boxes a and b, which no case touches; and the one that is tried, on c and d. Box e is free."""
LAYERS = {STEADY: "a=0:6,b=6:12", TRIED: "c=0:6,d=6:12"}
ASK = Ask(11, prompt_tokens=48, new_tokens=300)
MAX_CONTEXT = 512
ANSWER_S = 3.0
"""From its start, a coordinator answers within so many seconds."""
LIMIT_S = 30.0
"""For anything of a case to happen. A quiet machine needs a second."""
LATE_S = 1.5
"""For a box to be late, so that there is time to delete what it is busy with."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Write:
    """`what` the coordinator writes, as `hooks.hook_coordinator` names it, and the story that brings it about.

    `edge` is the way between phases that is written so, as `core.transitions` has it.
    """

    what: str
    story: str
    edge: tuple[Phase, Trigger] | None = None
    time: int = 1
    """Which of several such writes."""

    def name(self, place: Place) -> str:
        return f"{self.story}/{place}/{self.what}" + (f" {self.time}" if self.time > 1 else "")


WRITES = (
    Write("new->loading", "deploy"),
    Write("loading->activating", "deploy", (Phase.LOADING, Trigger.ALL_PREPARED)),
    Write("activating->ready", "deploy", (Phase.ACTIVATING, Trigger.HEAD_READY)),
    Write("loading->failed", "deploy, a box dies loading", (Phase.LOADING, Trigger.BROKE_BEFORE_READY)),
    Write("activating->failed", "deploy, the head dies opening", (Phase.ACTIVATING, Trigger.BROKE_BEFORE_READY)),
    Write("ready->waiting", "a box dies", (Phase.READY, Trigger.BROKE_AFTER_READY)),
    Write("waiting->loading", "a box dies", (Phase.WAITING, Trigger.REPLANNED)),
    Write("loading->activating", "a box dies"),
    Write("activating->ready", "a box dies"),
    Write("loading->waiting", "a box dies, the spare dies loading", (Phase.LOADING, Trigger.BROKE_AFTER_READY)),
    Write("activating->waiting", "a box dies, the head dies opening", (Phase.ACTIVATING, Trigger.BROKE_AFTER_READY)),
    Write("ready->activating", "the head's stream breaks", (Phase.READY, Trigger.HEAD_DETACHED)),
    Write("activating->ready", "the head's stream breaks"),
    Write("waiting->activating", "the coordinator restarts", (Phase.WAITING, Trigger.ADOPTED)),
    Write("activating->ready", "the coordinator restarts"),
    Write("waiting->loading", "coordinator and box restart", (Phase.WAITING, Trigger.NODES_BACK)),
    Write("ready->deleting", "delete", (Phase.READY, Trigger.DELETE)),
    Write("deleting->gone", "delete"),
    Write("deleting->deleting", "delete twice"),
    Write("loading->deleting", "delete while loading", (Phase.LOADING, Trigger.DELETE)),
    Write("activating->deleting", "delete while opening", (Phase.ACTIVATING, Trigger.DELETE)),
    Write("waiting->deleting", "delete while waiting", (Phase.WAITING, Trigger.DELETE)),
    Write("failed->deleting", "delete what failed", (Phase.FAILED, Trigger.DELETE)),
    Write("node", "a box restarts"),
    Write("measurements", "links are measured"),
    Write("traffic", "the coordinator stops"),
    Write("blob", "a model is added"),
    Write("manifest", "a model is added"),
    Write("names", "a model is added"),
    Write("names", "a model is deleted"),
    Write("operation", "a model is deleted"),
    Write("operation", "a model is deleted", time=2),
)
ENDS_READY = frozenset({"deploy", "a box dies", "the head's stream breaks", "the coordinator restarts"})


def cases(only: str = "") -> Iterator[tuple[Write, Place]]:
    """Before and behind each write."""
    for write in WRITES:
        for place in sorted(OF_SAVES):
            if only in write.name(place):
                yield write, place


@dataclass(frozen=True, slots=True)
class Known:
    """What a coordinator acknowledged: boxes' ids by name, models, and deployments with their phases and epochs."""

    nodes: dict[str, str]
    models: frozenset[str]
    deployments: dict[str, tuple[Phase, int]]


@dataclass(slots=True)
class Outcome:
    """`problems` is empty when the case holds; `answer_s` is from the restarted coordinator's start to its answer."""

    name: str
    problems: list[str] = field(default_factory=list)
    answer_s: float = 0.0
    wall_s: float = 0.0


class Writes:
    """Runs cases one after the other on a site of its own boxes, which `start` makes ready."""

    def __init__(self, site: ChaosSite) -> None:
        self.site = site
        self._reference: Reference | None = None
        self._count = 0
        self._other = site.directory / "other-model"

    async def start(self) -> None:
        """Deploy what stays, and learn the right answer."""
        shutil.copytree(DEMO_MODEL, self._other)
        path = self._other / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "mark": "another"}))
        await self.site.client.deploy(_spec(STEADY), timeout_s=LIMIT_S)
        stream = Stream(ASK, STEADY)
        await stream.run(self.site.client)
        if stream.error is not None:
            raise stream.error
        self._reference = reference_of(stream.events)

    async def run(self, write: Write, place: Place) -> Outcome:
        """What came of a case. The site is whole afterwards. Raises TimeoutError when that takes too long."""
        self._count += 1
        outcome, began = Outcome(write.name(place)), time.monotonic()
        point = f"{self._count} {outcome.name}"
        story = Story(self, write.story)
        async with asyncio.timeout(4 * LIMIT_S):
            await story.prepare()
            streams = [await self._begin(STEADY), *([await self._begin(TRIED)] if story.begins_ready else [])]
            before = await self.known()
            seen = self._log_size()
            self.site.arm(COORDINATOR, [Failpoint(point, place, what=write.what, time=write.time)])
            acting = asyncio.create_task(story.act())
            try:
                await self.site.until(lambda: point in self.site.marks(), LIMIT_S)
            except TimeoutError:
                outcome.problems.append("the failpoint did not act")
            await self.site.killed({point: Action.KILL})
            answered = frozenset(story.answered)
            outcome.answer_s, after = await self.start_coordinator()
            outcome.problems += story.lost(before, after, answered)
            await story.heal()
            for end in await asyncio.gather(acting, return_exceptions=True):
                outcome.problems += [f"the call failed: {end!r}"] if isinstance(end, Exception) else []
            outcome.problems += [problem for stream in streams for problem in await self._ended(*stream, story)]
            outcome.problems += await story.finish(before)
            outcome.problems += self._released(seen)
        if outcome.answer_s > ANSWER_S:
            outcome.problems.append(f"the coordinator answered {outcome.answer_s:.2f} s after its start")
        outcome.wall_s = time.monotonic() - began
        return outcome

    async def start_coordinator(self) -> tuple[float, Known]:
        """Seconds from its start to its first answer, and what it knew then."""
        began = time.monotonic()
        if not self.site.daemons[COORDINATOR].alive:
            await self.site.daemons[COORDINATOR].start()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with Client(self.site.address) as client:
                        known = await self.known(client)
                    return time.monotonic() - began, known
                except EdgeShardError:
                    await asyncio.sleep(POLL_S)

    async def known(self, client: Client | None = None) -> Known:
        client = client or self.site.client
        nodes, deployments = await client.nodes(), await client.deployments()
        models = await client.stored_models()
        return Known(
            {str(node.name): str(node.node_id) for node in nodes},
            frozenset(str(model.name) for model in models),
            {str(deployment.spec.name): (deployment.phase, int(deployment.epoch)) for deployment in deployments},
        )

    async def insist(self, method: str, request: Any) -> None:
        """Send a call with one operation id until it is answered. Raises as the call does, but when it is lost."""
        request.operation_id = uuid.uuid4().hex
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with open_channel(self.site.address, None) as channel:
                        await getattr(AdminServiceStub(channel), method)(request, timeout=LIMIT_S)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise from_rpc_error(error) from None
                await asyncio.sleep(POLL_S)

    async def phase(self, wanted: Iterable[Phase | None], timeout_s: float = LIMIT_S) -> Phase | None:
        """Wait until the tried deployment is in one of these phases; None is gone."""
        phases, found = tuple(wanted), None

        async def there() -> bool:
            nonlocal found
            try:
                found = (await self.site.client.deployment(TRIED)).phase
            except NotFoundError:
                found = None
            return found in phases

        await self.site.until(there, timeout_s)
        return found

    async def _begin(self, deployment: str) -> tuple[Stream, asyncio.Task[None]]:
        stream = Stream(ASK, deployment)
        running = asyncio.create_task(stream.run(self.site.client))
        await asyncio.wait_for(stream.has(2), LIMIT_S)
        return stream, running

    async def _ended(self, stream: Stream, running: asyncio.Task[None], story: Story) -> list[str]:
        assert self._reference is not None
        try:
            await asyncio.wait_for(running, LIMIT_S)
        except TimeoutError:
            return ["a request had not ended"]
        if stream.error is not None:
            # What is deleted under a request ends it, and says so.
            allowed = story.deletes and stream.deployment == TRIED
            return [] if allowed else [f"a request of {stream.deployment} failed: {stream.error.message}"]
        return [f"{stream.deployment}: {problem}" for problem in check(stream.events, self._reference).problems]

    def _log_size(self) -> int:
        return len(self.site.daemons[COORDINATOR].log.read_bytes())

    def _released(self, seen: int) -> list[str]:
        """Commands that would end what serves, in the coordinator's log from there on."""
        lines = self.site.daemons[COORDINATOR].log.read_bytes()[seen:].decode().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        commands = [line for line in said if line.get("event") == "command_sent" and line.get("deployment") == STEADY]
        return [f"box was sent {line['kind']} for {STEADY}" for line in commands if line["kind"] != "ActivateHead"]


class Story:
    """`prepare` before the failpoint is armed, `act` while it is, `heal` once the coordinator is back; `finish` says
    how it must have ended, and tidies up."""

    def __init__(self, trial: Writes, name: str) -> None:
        self._trial = trial
        self._site = trial.site
        self._name = name
        self._arm_count = 0
        self.answered: set[str] = set()
        """Calls of the coordinator that it answered."""

    @property
    def begins_ready(self) -> bool:
        return self._name in {
            *(ENDS_READY - {"deploy"}),
            "a box dies, the spare dies loading",
            "a box dies, the head dies opening",
            "coordinator and box restart",
            "delete",
            "delete twice",
            "delete while waiting",
        }

    @property
    def deletes(self) -> bool:
        return self._name.startswith("delete")

    async def prepare(self) -> None:
        if self.begins_ready:
            await self._site.client.deploy(_spec(TRIED), timeout_s=LIMIT_S)
        match self._name:
            case "deploy, a box dies loading":
                self._arm("d", Place.BEFORE_LOAD)
            case "deploy, the head dies opening" | "a box dies, the head dies opening":
                self._arm("c", Place.BEFORE_ATTACH)
            case "a box dies, the spare dies loading":
                self._arm("e", Place.BEFORE_LOAD)
            case "delete while loading":
                self._arm("d", Place.DURING_LOAD, Action.SLEEP)
            case "delete while opening":
                self._arm("c", Place.BEFORE_ATTACH, Action.SLEEP)
            case "delete what failed":
                self._arm("d", Place.BEFORE_LOAD)
                await self._site.client.deploy(_spec(TRIED), wait=False)
                await self._trial.phase([Phase.FAILED])
                await self._site.start_daemon("d")
            case "a model is deleted":
                await self._site.client.add_model(self._trial._other, OTHER_MODEL)

    async def act(self) -> None:
        async def insist(method: str, request: Any) -> None:
            await self._trial.insist(method, request)
            self.answered.add(method)

        site = self._site
        delete = admin_pb2.DeleteDeploymentRequest(name=TRIED)
        match self._name:
            case "deploy" | "deploy, a box dies loading" | "deploy, the head dies opening":
                await insist("Deploy", admin_pb2.DeployRequest(spec=spec_to_wire(_spec(TRIED))))
            case "delete" | "delete what failed":
                await insist("DeleteDeployment", delete)
            case "delete twice":
                site.daemons["d"].signal(signal.SIGSTOP)
                await insist("DeleteDeployment", delete)
                with contextlib.suppress(NotFoundError):
                    await insist("DeleteDeployment", delete)
            case "delete while loading" | "delete while opening":
                await insist("Deploy", admin_pb2.DeployRequest(spec=spec_to_wire(_spec(TRIED))))
                await self._trial.phase([Phase.LOADING if self._name.endswith("loading") else Phase.ACTIVATING])
                await insist("DeleteDeployment", delete)
            case "delete while waiting":
                await self._restart(without="d")
                await insist("DeleteDeployment", delete)
            case "coordinator and box restart":
                await self._restart(without="d")
                await site.daemons["d"].start()
            case "the coordinator restarts":
                await self._restart()
            case "the head's stream breaks":
                self._arm("c", Place.BEFORE_SAY, Action.LOSE_REPLY)
            case "a box restarts":
                await site.daemons["e"].kill()
                await site.daemons["e"].start()
            case "links are measured":
                with contextlib.suppress(UnavailableError):
                    async for _ in site.client.profile(nodes=("e",)):
                        pass
            case "the coordinator stops":
                await site.client.complete(STEADY, ASK.prompt, max_new_tokens=2)
                await site.daemons[COORDINATOR].stop()
            case "a model is added":
                await self._add_model()
            case "a model is deleted":
                await insist("DeleteModel", admin_pb2.DeleteModelRequest(name=OTHER_MODEL))
            case _:
                await site.daemons["d"].kill()

    def lost(self, before: Known, after: Known, answered: frozenset[str]) -> list[str]:
        """What of that which was acknowledged the restarted coordinator does not know."""
        problems = [f"box {name} is not known" for name, of in before.nodes.items() if after.nodes.get(name) != of]
        kept = before.models - ({OTHER_MODEL} if self._name == "a model is deleted" else set())
        problems += [f"model {name} is not known" for name in sorted(kept - after.models)]
        for name, (_, epoch) in before.deployments.items():
            found = after.deployments.get(name)
            if found is None and not (self.deletes and name == TRIED):
                problems.append(f"deployment {name} is not known")
            elif found is not None and found[1] < epoch:
                problems.append(f"deployment {name} is back at epoch {found[1]}, it was at {epoch}")
        tried = after.deployments.get(TRIED)
        if "DeleteDeployment" in answered:
            if tried is not None and tried[0] is not Phase.DELETING:
                problems.append(f"the deletion of {TRIED} was answered, and it is {tried[0]}")
        elif "Deploy" in answered and tried is None and not self.deletes:
            problems.append(f"{TRIED} was answered, and is not known")
        return problems

    async def heal(self) -> None:
        """Every box is there and no failpoint is armed."""
        for name in BOXES:
            self._site.daemons[name].signal(signal.SIGCONT)
        dead = set(self._site.dead())
        await self._site.start_dead(BOXES)
        for name in sorted(dead & set(BOXES)):
            await self._site.daemons[name].wait_ready()

    async def finish(self, before: Known) -> list[str]:
        problems = []
        if self.deletes:
            problems += await self._expect({None})
        elif self._name.startswith("deploy,"):
            # Where the failure was not on disk, the deployment is tried again, now with all boxes.
            problems += await self._expect({Phase.FAILED, Phase.READY})
        elif self._name == "deploy" or self.begins_ready:
            problems += await self._expect({Phase.READY})
        for name in self._site.nodes:
            self._disarm(name)
        self._disarm(COORDINATOR)
        await self._site.start_dead(BOXES)
        await asyncio.gather(*(self._site.daemons[name].wait_ready() for name in BOXES))
        after = await self._trial.known()
        if after.deployments.get(STEADY) != (Phase.READY, before.deployments[STEADY][1]):
            problems.append(f"{STEADY} was {before.deployments[STEADY]} and is {after.deployments.get(STEADY)}")
        if self._name == "the coordinator restarts" and after.deployments.get(TRIED) != before.deployments[TRIED]:
            problems.append(f"{TRIED} was {before.deployments[TRIED]} and is {after.deployments.get(TRIED)}")
        if self._name == "a model is added" and OTHER_MODEL not in after.models:
            problems.append("the model that was added is not there")
        if self._name == "a model is deleted" and OTHER_MODEL in after.models:
            problems.append("the model that was deleted is there")
        if OTHER_MODEL in after.models:
            await self._site.client.delete_model(OTHER_MODEL)
        if TRIED in after.deployments:
            await self._site.client.delete_deployment(TRIED, timeout_s=LIMIT_S)
        await self._site.until(self._whole, LIMIT_S)
        return problems

    async def _whole(self) -> bool:
        nodes = await self._site.client.nodes()
        return len(nodes) == len(BOXES) and all(node.placeable for node in nodes)

    async def _expect(self, phases: set[Phase | None]) -> list[str]:
        try:
            await self._trial.phase(phases)
        except TimeoutError:
            return [f"{TRIED} did not become {', '.join(str(phase) for phase in phases)}"]
        return []

    async def _restart(self, without: str = "") -> None:
        """The coordinator is killed and started again; at the same time a box is killed."""
        await self._site.daemons[COORDINATOR].kill()
        if without:
            await self._site.daemons[without].kill()
        await self._site.daemons[COORDINATOR].start()

    async def _add_model(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with Client(self._site.address) as client:
                        await client.add_model(self._trial._other, OTHER_MODEL)
                    return
                except UnavailableError:
                    await asyncio.sleep(POLL_S)

    def _arm(self, name: str, place: Place, action: Action = Action.KILL) -> None:
        self._arm_count += 1
        point = f"{self._trial._count}.{self._arm_count} {name} {place}"
        self._site.arm(name, [Failpoint(point, place, action=action, seconds=LATE_S)])

    def _disarm(self, name: str) -> None:
        self._site.arm(name, [])


def _spec(name: str) -> Any:
    return spec(name=name, layers=LAYERS[name], source=LAYERS[name][0], max_context=MAX_CONTEXT)


async def run(chosen: Sequence[tuple[Write, Place]], directory: Path) -> list[Outcome]:
    """Run cases on one site, until one breaks it."""
    outcomes: list[Outcome] = []
    async with ChaosSite(directory, BOXES) as site:
        if not site.native:
            raise SystemExit("The native kernels are not in use, and no other bits are promised: `make setup`.")
        trial = Writes(site)
        await trial.start()
        for write, place in chosen:
            try:
                outcome = await trial.run(write, place)
            except (TimeoutError, EdgeShardError, RuntimeError) as error:
                outcomes.append(Outcome(write.name(place), [f"the site broke: {error!r}"]))
                return outcomes
            outcomes.append(outcome)
            verdict = "FAIL" if outcome.problems else "ok"
            print(f"{verdict:4} answer {outcome.answer_s:.2f} s, {outcome.wall_s:4.1f} s  {outcome.name}", flush=True)
            for problem in outcome.problems:
                print(f"    {problem}", flush=True)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    answers = [outcome.answer_s for outcome in outcomes]
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    return (
        f"{len(outcomes)} kills, {failed} failed; from start to answer {statistics.median(answers):.2f} s in the median, "
        f"{max(answers):.2f} s at most; {sum(outcome.wall_s for outcome in outcomes):.0f} s in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has the text")
    parser.add_argument("--keep", type=Path, help="leave the logs here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        directory.mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(run(list(cases(arguments.only)), directory))
    print(summary(outcomes))
    for outcome in outcomes:
        if outcome.problems:
            print(f"FAIL {outcome.name}: {'; '.join(outcome.problems)}")
    sys.exit(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    main()
