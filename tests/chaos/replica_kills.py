"""Lost replicas: the node of one of two is killed amid answers of both, and its requests continue
at the other.

    python -m tests.chaos.replica_kills [--kills 50] [--seed 1] [--keep DIR]

Each kill is by a failpoint in a step that is drawn, as are replica and place, and has four
requests, whose answers are compared with the undisturbed ones. A pause is the longest wait of any
of them for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.matrix import Ask
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import answered, stream_of
from tests.support.checker import Reference, check, reference_of

NODES = ("a", "b")
ASKS = tuple(
    Ask(seed, prompt_tokens=prompt, new_tokens=60, sampled=seed % 2 == 0, logprobs=True)
    for seed, prompt in ((11, 40), (12, 16), (13, 64), (14, 30))
)
PLACES = (
    Place.BEFORE_COMPUTE,
    Place.AFTER_COMPUTE,
    Place.BEFORE_RETURN,
    Place.AFTER_RETURN,
    Place.BEFORE_SAY,
)
LATEST = 40
"""The kill happens in one of this many steps or messages: there are more."""
LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Kill:
    """`problems` is empty when it is as it should be."""

    replica: str
    place: Place
    time: int
    pause_s: float
    moved: int
    """Requests that were at the lost replica."""
    wrong_tokens: int
    problems: tuple[str, ...]


async def kills(directory: Path, count: int, seed: int) -> list[Kill]:
    """So many kills, one after the other, on one site."""
    chance = random.Random(seed)
    done: list[Kill] = []
    async with ChaosSite(directory, NODES) as site:
        await site.deploy(layers=None, source=None, replicas=len(NODES))
        right = [reference_of((await answered(site, ask)).events) for ask in ASKS]
        for number in range(count):
            victim, place = chance.choice(NODES), chance.choice(PLACES)
            point = Failpoint(f"kill {number}", place, time=1 + chance.randrange(LATEST))
            done.append(_say(number, await _kill(site, victim, point, right)))
    return done


async def _kill(site: ChaosSite, victim: str, point: Failpoint, right: Sequence[Reference]) -> Kill:
    before = {one.spec.name: one for one in await site.client.replicas(DEPLOYMENT)}
    (lost,) = [name for name, one in before.items() if _node_of(one) == victim]
    streams = [stream_of(ask) for ask in ASKS]
    site.arm(victim, [point])
    running = [asyncio.create_task(stream.run(site.client)) for stream in streams]
    async with asyncio.timeout(LIMIT_S):
        moved = 0
        while not all(task.done() for task in running):
            now = {one.spec.name: one for one in await site.client.replicas(DEPLOYMENT)}
            if point.id not in site.marks() and lost in now:
                moved = max(moved, now[lost].active_requests)
            await asyncio.sleep(0.01)
        await asyncio.gather(*running)
    verdicts = [
        check(stream.events, known, whole=not stream.error)
        for stream, known in zip(streams, right, strict=True)
    ]
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    problems += [
        f"{stream.error.reason}: {stream.error.message}"
        for stream in streams
        if stream.error is not None
    ]
    problems += [] if point.id in site.marks() else ["nobody was killed"]
    problems += await _after(site, before, lost)
    await site.killed({point.id: Action.KILL})
    await site.restore()
    pause_s = max(gap for stream in streams for gap in stream.waits_s)
    wrong = sum(verdict.wrong_tokens for verdict in verdicts)
    return Kill(lost, point.place, point.time, pause_s, moved, wrong, tuple(problems))


async def _after(site: ChaosSite, before: dict[str, Deployment], lost: str) -> list[str]:
    """The faults of the replicas while one is gone: the other must continue at its epoch."""
    problems = []
    for one in await site.client.replicas(DEPLOYMENT):
        name = one.spec.name
        if name == lost and one.phase is DeploymentPhase.READY:
            problems.append(f"{name} is ready without its node")
        if name != lost and (
            one.phase is not DeploymentPhase.READY or one.epoch != before[name].epoch
        ):
            problems.append(
                f"{name} is {one.phase} at epoch {one.epoch}, and was ready at {before[name].epoch}"
            )
    return problems


def _node_of(replica: Deployment) -> str:
    return str(replica.placement.head.node_name)


def _say(number: int, kill: Kill) -> Kill:
    verdict = "FAIL" if kill.problems else "ok"
    what = f"{kill.replica} {kill.place} x{kill.time}, {kill.moved} requests there"
    sys.stdout.write(
        f"{number:3} {verdict:4} {what}: {kill.pause_s:.2f} s (load {os.getloadavg()[0]:.1f})\n"
    )
    sys.stdout.writelines(f"    {problem}\n" for problem in kill.problems)
    sys.stdout.flush()
    return kill


def report(done: Sequence[Kill]) -> str:
    """All kills in one sentence."""
    pauses = [kill.pause_s for kill in done]
    return (
        f"{len(done)} kills of one of two replicas with {sum(kill.moved for kill in done)} "
        "requests there of "
        f"{len(ASKS) * len(done)}: {sum(kill.wrong_tokens for kill in done)} wrong tokens, "
        f"{sum(bool(kill.problems) for kill in done)} failed; pause "
        f"{statistics.median(pauses):.2f} s in the median, "
        f"{max(pauses):.2f} s at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the logs here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = arguments.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        )
        directory.mkdir(parents=True, exist_ok=True)
        try:
            done = asyncio.run(kills(directory, arguments.kills, arguments.seed))
        except EdgeShardError as error:
            sys.exit(f"the site did not serve: {error.message}")
    sys.stdout.write(report(done) + "\n")
    sys.exit(int(any(kill.problems for kill in done)))


if __name__ == "__main__":
    main()
