"""Nodes that stall for good: any node of a deployment is stopped (SIGSTOP) amid answers, which
continue elsewhere.

    python -m tests.chaos.stops [--stops 200] [--seed 1] [--keep DIR]

Deployments have 1 to 4 stages. Each stop has three requests, whose answers are compared with the
undisturbed ones; node and moment are drawn. A pause is the longest wait of any of them for a token.
It contains the work of another node, which takes long on a busy machine; the time until the
coordinator gives up the node depends on clocks only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from tests.chaos.matrix import Ask
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import answered, stream_of
from tests.support.checker import Reference, check, reference_of

NODES = ("a", "b", "c", "d", "e")
"""One more than stages: who takes over."""
CUTS = ("a=0:12", "a=0:6,b=6:12", "a=0:4,b=4:9,c=9:12", "a=0:3,b=3:6,c=6:9,d=9:12")
ASKS = (
    Ask(5, prompt_tokens=48, new_tokens=300),
    Ask(6, prompt_tokens=100, new_tokens=250),
    Ask(7, prompt_tokens=16, new_tokens=280, sampled=True),
)
LATEST = 200
"""At most this many tokens have arrived before the stop."""
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stop:
    """`problems` is empty when it is as it should be. After `noticed_s` the deployment was no
    longer served by it."""

    stages: int
    stage: int
    noticed_s: float
    pause_s: float
    wrong_tokens: int
    failed: int
    problems: tuple[str, ...]


async def stops(directory: Path, stage_counts: Sequence[int], seed: int) -> list[Stop]:
    """One stop for each of these numbers of stages."""
    chance = random.Random(seed)
    done: list[Stop] = []
    async with ChaosSite(directory, NODES[: max(stage_counts) + 1]) as site:
        right: list[Reference] = []
        for count in stage_counts:
            if not done or len(await site.stages()) != count:
                await site.deploy(layers=CUTS[count - 1], max_context=512)
            if not right:
                right = [reference_of((await answered(site, ask)).events) for ask in ASKS]
            done.append(_say(len(done), await _stop(site, right, chance)))
    return done


async def _stop(site: ChaosSite, right: Sequence[Reference], chance: random.Random) -> Stop:
    nodes = await site.stages()
    before = await site.client.deployment(DEPLOYMENT)
    stage, after = chance.randrange(len(nodes)), chance.randrange(LATEST)
    streams = [stream_of(ask) for ask in ASKS]
    running = [asyncio.create_task(stream.run(site.client)) for stream in streams]
    async with asyncio.timeout(LIMIT_S):
        await streams[0].has(after)
        site.daemons[nodes[stage]].send_signal(signal.SIGSTOP)
        noticed_s = await _noticed_s(site, before.epoch)
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
    if nodes[stage] in await site.stages():
        problems.append(f"node {nodes[stage]} still has a stage")
    await site.restore()
    return Stop(
        len(nodes),
        stage,
        noticed_s,
        max(max(stream.waits_s) for stream in streams),
        sum(verdict.wrong_tokens for verdict in verdicts),
        sum(stream.error is not None for stream in streams),
        tuple(problems),
    )


async def _noticed_s(site: ChaosSite, epoch: int) -> float:
    """The seconds until the deployment is no longer ready at this epoch."""
    began_s = time.monotonic()
    while True:
        record = await site.client.deployment(DEPLOYMENT)
        if (record.phase, record.epoch) != (DeploymentPhase.READY, epoch):
            return time.monotonic() - began_s
        await asyncio.sleep(0.05)


def _say(number: int, stop: Stop) -> Stop:
    verdict = "FAIL" if stop.problems else "ok"
    where = f"stage {stop.stage} of {stop.stages}"
    times = f"{stop.noticed_s:.2f} s until it was given up, {stop.pause_s:.2f} s of pause"
    sys.stdout.write(f"{number:3} {verdict:4} {where}: {times} (load {os.getloadavg()[0]:.1f})\n")
    sys.stdout.writelines(f"    {problem}\n" for problem in stop.problems)
    sys.stdout.flush()
    return stop


def report(done: Sequence[Stop]) -> str:
    """A row for each number of stages, and one for all."""
    rows = [
        "| stages | stops | median pause | 95 % | worst | wrong tokens | failed |",
        "| " + "--- | " * 7,
    ]
    counts = sorted({stop.stages for stop in done})
    for name, some in [(str(n), [s for s in done if s.stages == n]) for n in counts] + [
        ("all", list(done))
    ]:
        pauses = sorted(stop.pause_s for stop in some)
        most = pauses[min(len(pauses) - 1, int(0.95 * len(pauses)))]
        wrong, failed = sum(stop.wrong_tokens for stop in some), sum(stop.failed for stop in some)
        middle = statistics.median(pauses)
        rows.append(
            f"| {name} | {len(some)} | {middle:.2f} s | {most:.2f} s | {pauses[-1]:.2f} s | "
            f"{wrong} | {failed} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the logs here")
    arguments = parser.parse_args()
    # Each cut for a while: a changed cut is a new deployment.
    counts = sorted(1 + number % len(CUTS) for number in range(arguments.stops))
    with ExitStack() as stack:
        directory = arguments.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        )
        directory.mkdir(parents=True, exist_ok=True)
        try:
            done = asyncio.run(stops(directory, counts, arguments.seed))
        except EdgeShardError as error:
            sys.exit(f"the site did not serve: {error.message}")
    sys.stdout.write(report(done) + "\n")
    sys.exit(int(any(stop.problems for stop in done)))


if __name__ == "__main__":
    main()
