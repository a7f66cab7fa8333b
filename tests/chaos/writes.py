"""The coordinator is killed around each of its writes, and must come back with all that it
acknowledged.

    python -m tests.chaos.writes [--only TEXT] [--keep DIR]

Two nodes serve one deployment all the time. Two more have another one, which is deployed, loses
nodes, continues, and is deleted. In each case the coordinator is killed directly before or after
one write, and started again. Then it must answer soon and know what it had acknowledged. The other
deployment must keep its epoch, and its request the tokens of an undisturbed run. The requests of a
deployment that continues must keep their tokens, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from edgeshard_coordinator.core.deployments.transitions import Trigger

from edgeshard import Client
from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from edgeshard.domain.errors import EdgeShardError
from tests.chaos.failpoints import OF_SAVES, Action, Failpoint, Place
from tests.chaos.run import say
from tests.chaos.site import DEMO_MODEL, ChaosSite
from tests.chaos.stories import (
    ANSWER_S,
    ASK,
    LIMIT_S,
    NODES,
    POLL_S,
    STEADY,
    TRIED,
    Known,
    Operator,
    Story,
    spec_of,
)
from tests.chaos.trial import stream_of
from tests.support.checker import Reference, check, reference_of
from tests.support.load import Stream
from tests.support.site import COORDINATOR


@dataclass(frozen=True, slots=True)
class Write:
    """`what` the coordinator writes, as `hooks.hook_coordinator` names it, and the story that
    brings it about.

    `edge` is the way between phases that is written so, as `core.deployments.transitions` has it.
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
    Write(
        "loading->failed",
        "deploy, a node dies loading",
        (Phase.LOADING, Trigger.BROKE_BEFORE_READY),
    ),
    Write(
        "activating->failed",
        "deploy, the head dies opening",
        (Phase.ACTIVATING, Trigger.BROKE_BEFORE_READY),
    ),
    Write("ready->waiting", "a node dies", (Phase.READY, Trigger.BROKE_AFTER_READY)),
    Write("waiting->loading", "a node dies", (Phase.WAITING, Trigger.REPLANNED)),
    Write("loading->activating", "a node dies"),
    Write("activating->ready", "a node dies"),
    Write(
        "loading->waiting",
        "a node dies, the spare dies loading",
        (Phase.LOADING, Trigger.BROKE_AFTER_READY),
    ),
    Write(
        "activating->waiting",
        "a node dies, the head dies opening",
        (Phase.ACTIVATING, Trigger.BROKE_AFTER_READY),
    ),
    Write("ready->activating", "the head's stream breaks", (Phase.READY, Trigger.HEAD_DETACHED)),
    Write("activating->ready", "the head's stream breaks"),
    Write("waiting->activating", "the coordinator restarts", (Phase.WAITING, Trigger.ADOPTED)),
    Write("activating->ready", "the coordinator restarts"),
    Write("waiting->loading", "coordinator and node restart", (Phase.WAITING, Trigger.NODES_BACK)),
    Write("ready->loading", "replan", (Phase.READY, Trigger.MOVE)),
    Write("ready->deleting", "delete", (Phase.READY, Trigger.DELETE)),
    Write("deleting->gone", "delete"),
    Write("deleting->deleting", "delete twice"),
    Write("loading->deleting", "delete while loading", (Phase.LOADING, Trigger.DELETE)),
    Write("activating->deleting", "delete while opening", (Phase.ACTIVATING, Trigger.DELETE)),
    Write("waiting->deleting", "delete while waiting", (Phase.WAITING, Trigger.DELETE)),
    Write("failed->deleting", "delete what failed", (Phase.FAILED, Trigger.DELETE)),
    Write("node", "a node restarts"),
    Write("node that is deleted", "a node is deleted"),
    Write("measurements", "links are measured"),
    Write("traffic", "the coordinator stops"),
    Write("blob", "a model is added"),
    Write("manifest", "a model is added"),
    Write("names", "a model is added"),
    Write("names", "a model is deleted"),
    Write("operation", "a model is deleted"),
    Write("operation", "a model is deleted", time=2),
)


def cases(only: str = "") -> Iterator[tuple[Write, Place]]:
    """Before and after each write."""
    for write in WRITES:
        for place in sorted(OF_SAVES):
            if only in write.name(place):
                yield write, place


@dataclass(slots=True)
class Outcome:
    """`problems` is empty when the case holds; `answer_s` is from the restarted coordinator's start
    to its answer."""

    name: str
    problems: list[str] = field(default_factory=list)
    answer_s: float = 0.0
    wall_s: float = 0.0


class Writes:
    """Runs cases one after the other on a site of its own nodes, which `start` makes ready."""

    def __init__(self, site: ChaosSite) -> None:
        self.site = site
        self._reference: Reference | None = None
        self._count = 0
        self.operator = Operator(site)

    async def start(self) -> None:
        """Deploy what stays, and learn the right answer."""
        shutil.copytree(DEMO_MODEL, self.operator.other_model)
        path = self.operator.other_model / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "mark": "another"}))
        await self.site.client.deploy(spec_of(STEADY), timeout_s=LIMIT_S)
        stream = stream_of(ASK, STEADY)
        await stream.run(self.site.client)
        if stream.error is not None:
            raise stream.error
        self._reference = reference_of(stream.events)

    async def run(self, write: Write, place: Place) -> Outcome:
        """The outcome of a case. The site is whole afterwards. Raises TimeoutError when that takes
        too long."""
        self._count += 1
        outcome, began = Outcome(write.name(place)), time.monotonic()
        point = f"{self._count} {outcome.name}"
        story = Story(self.operator, write.story, self._count)
        async with asyncio.timeout(4 * LIMIT_S):
            await story.prepare()
            streams = [
                await self._begin(STEADY),
                *([await self._begin(TRIED)] if story.begins_ready else []),
            ]
            before = await self.operator.known()
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
                outcome.problems += (
                    [f"the call failed: {end!r}"] if isinstance(end, Exception) else []
                )
            outcome.problems += [
                problem for stream in streams for problem in await self._ended(*stream, story)
            ]
            outcome.problems += await story.finish(before)
            outcome.problems += self._released(seen)
        if outcome.answer_s > ANSWER_S:
            outcome.problems.append(
                f"the coordinator answered {outcome.answer_s:.2f} s after its start"
            )
        outcome.wall_s = time.monotonic() - began
        return outcome

    async def start_coordinator(self) -> tuple[float, Known]:
        """Seconds from its start to its first answer, and its knowledge then."""
        began = time.monotonic()
        if self.site.daemons[COORDINATOR].pid is None:
            await self.site.daemons[COORDINATOR].start()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    async with Client(self.site.address, plaintext=True) as client:
                        known = await self.operator.known(client)
                    return time.monotonic() - began, known
                except EdgeShardError:
                    await asyncio.sleep(POLL_S)

    async def _begin(self, deployment: str) -> tuple[Stream, asyncio.Task[Stream]]:
        stream = stream_of(ASK, deployment)
        running = asyncio.create_task(stream.run(self.site.client))
        await asyncio.wait_for(stream.has(2), LIMIT_S)
        return stream, running

    async def _ended(
        self, stream: Stream, running: asyncio.Task[Stream], story: Story
    ) -> list[str]:
        assert self._reference is not None
        try:
            await asyncio.wait_for(running, LIMIT_S)
        except TimeoutError:
            return ["a request had not ended"]
        if stream.error is not None:
            # A request on a deleted deployment ends with an error that reports it.
            allowed = story.deletes and stream.deployment == TRIED
            return (
                []
                if allowed
                else [f"a request of {stream.deployment} failed: {stream.error.message}"]
            )
        return [
            f"{stream.deployment}: {problem}"
            for problem in check(stream.events, self._reference).problems
        ]

    def _log_size(self) -> int:
        return len(self.site.daemons[COORDINATOR].log_path.read_bytes())

    def _released(self, seen: int) -> list[str]:
        """Commands that would end what serves, in the coordinator's log from there on."""
        lines = self.site.daemons[COORDINATOR].log_path.read_bytes()[seen:].decode().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        commands = [
            line
            for line in said
            if line.get("event") == "command_sent" and line.get("deployment") == STEADY
        ]
        return [
            f"node was sent {line['kind']} for {STEADY}"
            for line in commands
            if line["kind"] != "ActivateHead"
        ]


async def run(chosen: Sequence[tuple[Write, Place]], directory: Path) -> list[Outcome]:
    """Run cases on one site, until one breaks it."""
    outcomes: list[Outcome] = []
    async with ChaosSite(directory, NODES) as site:
        if not site.native:
            raise SystemExit(
                "The native kernels are not in use, and no other bits are promised: `make setup`."
            )
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
            say(
                f"{verdict:4} answer {outcome.answer_s:.2f} s, {outcome.wall_s:4.1f} s  "
                f"{outcome.name}"
            )
            for problem in outcome.problems:
                say(f"    {problem}")
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    answers = [outcome.answer_s for outcome in outcomes]
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    return (
        f"{len(outcomes)} kills, {failed} failed; from start to answer "
        f"{statistics.median(answers):.2f} s in the "
        f"median, {max(answers):.2f} s at most; {sum(outcome.wall_s for outcome in outcomes):.0f} "
        "s in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name has the text")
    parser.add_argument("--keep", type=Path, help="leave the logs here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = arguments.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        )
        directory.mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(run(list(cases(arguments.only)), directory))
    say(summary(outcomes))
    for outcome in outcomes:
        if outcome.problems:
            say(f"FAIL {outcome.name}: {'; '.join(outcome.problems)}")
    sys.exit(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    main()
