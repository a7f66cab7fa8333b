"""Nodes that stall for a moment, and steps that take long: no node counts as dead, and no token is
lost.

    python -m tests.chaos.standstill [--tries 20] [--step 30] [--keep DIR]

A node is stopped (SIGSTOP) in the middle of an answer and continues 1.5 s later: the epoch must
stay. After 2 s the answer may have moved to other nodes, but its tokens are the same. A stopped
coordinator gives up no node, however long. A long step, of an emulated device or of processor time,
is no reason to give up its node.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.step import Span, StepPlan
from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.matrix import Ask
from tests.chaos.site import DEMO_MODEL, DEPLOYMENT, ChaosSite
from tests.chaos.trial import answered, stream_of
from tests.support.checker import Reference, check, reference_of
from tests.support.load import Stream
from tests.support.site import COORDINATOR

SHORT_S, LONG_S = 1.5, 2.0
"""A pause that costs nothing, and one that may cost a replay."""
BLIND_S = 30.0
"""Stop of a coordinator: longer than nodes' streams last without it."""
NODES = ("a", "b", "c", "d")
ASK = Ask(5, prompt_tokens=48, new_tokens=300)
FEW = Ask(5, prompt_tokens=16, new_tokens=2)
LIMIT_S = 60.0
SLOW_LAYERS = LayerRange(4, 12)
LAB = """
source = "a"
[[device]]
name = "a"
memory_bytes = 8e9
bandwidth_bytes_per_s = 100e9
flops = 2e12
[[device]]
name = "b"
memory_bytes = 8e9
bandwidth_bytes_per_s = {bandwidth}
flops = 2e12
[[link]]
bandwidth_bps = 1e9
latency_s = 0.001
[model]
dtype = "float32"
[workload]
prompt_tokens = 16
new_tokens = 2
[lab]
model = "config.json"
"""


@dataclass(frozen=True, slots=True)
class Try:
    """`problems` is empty when it is as it should be; `longest_s` is the longest wait for a
    token."""

    name: str
    problems: tuple[str, ...]
    longest_s: float
    moved: bool
    """Whether the deployment had another epoch afterwards."""


async def pauses(directory: Path, tries: Sequence[float], blind: Sequence[float] = ()) -> list[Try]:
    """Stop a node for each of these seconds, the nodes of all stages in turns, and the coordinator
    for each `blind`."""
    async with ChaosSite(directory, NODES) as site:
        await site.deploy(max_context=512)
        right = reference_of((await answered(site, ASK)).events)
        done = []
        for number, pause_s in enumerate(tries):
            stages = await site.stages()
            done.append(say(await _pause(site, right, stages[number % len(stages)], pause_s)))
        return done + [say(await _pause(site, right, COORDINATOR, pause_s)) for pause_s in blind]


async def _pause(site: ChaosSite, right: Reference, node: str, pause_s: float) -> Try:
    before = await site.client.deployment(DEPLOYMENT)
    stream = stream_of(ASK)
    running = asyncio.create_task(stream.run(site.client))
    await asyncio.wait_for(stream.has(20), LIMIT_S)
    site.daemons[node].send_signal(signal.SIGSTOP)
    await asyncio.sleep(pause_s)
    site.daemons[node].send_signal(signal.SIGCONT)
    problems = [] if not stream.over else ["the answer ended before the pause did"]
    await asyncio.wait_for(running, LIMIT_S)
    problems += _wrong(stream, right)
    await site.restore()
    after = await site.client.deployment(DEPLOYMENT)
    moved = after.epoch != before.epoch
    if moved and (pause_s <= SHORT_S or node == COORDINATOR):
        problems.append(f"{node} cost epoch {before.epoch}")
    return Try(f"{pause_s:g} s of {node}", tuple(problems), max(stream.waits_s), moved)


async def emulated_step(directory: Path, step_s: float) -> Try:
    """Each step takes `step_s` on the emulated device of the second stage; the right answer is the
    one of only the first node."""
    directory.mkdir(parents=True, exist_ok=True)
    async with ChaosSite(
        directory, ("a", "b"), options=("--emulate", str(_lab_file(directory, step_s)))
    ) as site:
        return say(await _slow_answer(site, f"an emulated step of {step_s:g} s", step_s))


async def computed_step(directory: Path, step_s: float) -> Try:
    """One step takes `step_s` of processor time on the second stage."""
    async with ChaosSite(directory, ("a", "b")) as site:
        point = Failpoint("slow", Place.BEFORE_COMPUTE, action=Action.COMPUTE, seconds=step_s)
        return say(await _slow_answer(site, f"{step_s:g} s of processor time", step_s, point))


async def _slow_answer(
    site: ChaosSite, name: str, step_s: float, point: Failpoint | None = None
) -> Try:
    await site.deploy(layers=f"a=0:{SLOW_LAYERS.end}")
    right = reference_of((await answered(site, FEW)).events)
    before = await site.deploy(
        layers=f"a=0:{SLOW_LAYERS.first},b={SLOW_LAYERS.first}:{SLOW_LAYERS.end}"
    )
    if point is not None:
        site.arm("b", [point])
    stream = stream_of(FEW)
    async with asyncio.timeout(LIMIT_S + 4 * step_s):
        await stream.run(site.client)
    problems = _wrong(stream, right)
    if max(stream.waits_s) < step_s:
        problems.append(f"no step took so long: {max(stream.waits_s):.1f} s at most")
    after = await site.client.deployment(DEPLOYMENT)
    if (after.phase, after.epoch) != (DeploymentPhase.READY, before.epoch):
        problems.append(f"it was at epoch {before.epoch} and is {after.phase} at {after.epoch}")
    return Try(name, tuple(problems), max(stream.waits_s), after.epoch != before.epoch)


def _wrong(stream: Stream, right: Reference) -> list[str]:
    if stream.error is not None:
        return [f"the request failed: {stream.error.message}"]
    return list(check(stream.events, right).problems)


def _lab_file(directory: Path, step_s: float) -> Path:
    """A lab whose device b takes `step_s` for a step of its layers: a time that its memory's
    bandwidth makes."""
    from edgeshard_agent.emulation import load_emulation

    path = directory / "lab.toml"
    shutil.copy(DEMO_MODEL / "config.json", directory)
    trial = 1e6
    path.write_text(LAB.format(bandwidth=trial))
    plan = StepPlan(spans=(Span(1, 16, 1, True),))
    path.write_text(
        LAB.format(bandwidth=trial * load_emulation(path, "b").step_s(SLOW_LAYERS, plan) / step_s)
    )
    return path


def say(tried: Try) -> Try:
    verdict = "FAIL" if tried.problems else "ok"
    sys.stdout.write(
        f"{verdict:4} {tried.name}: {tried.longest_s:.2f} s at "
        f"most{', moved' if tried.moved else ''}\n"
    )
    sys.stdout.writelines(f"    {problem}\n" for problem in tried.problems)
    sys.stdout.flush()
    return tried


async def run(tries: int, step_s: float, directory: Path) -> int:
    """The exit code."""
    done = await pauses(directory / "pauses", [SHORT_S] * tries + [LONG_S] * tries, [BLIND_S])
    for pause_s, some in ((SHORT_S, done[:tries]), (LONG_S, done[tries : 2 * tries])):
        longest = [one.longest_s for one in some]
        sys.stdout.write(
            f"{pause_s:g} s: {sum(bool(one.problems) for one in some)} of {tries} wrong, "
            f"{sum(o.moved for o in some)} "
            f"moved; waits {statistics.median(longest):.2f} s in the median, {max(longest):.2f} s "
            "at most\n"
        )
    done.append(await emulated_step(directory / "emulated", step_s))
    done.append(await computed_step(directory / "computed", step_s))
    return int(any(one.problems for one in done))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=20, help="of each pause")
    parser.add_argument(
        "--step", type=float, default=30.0, metavar="SECONDS", help="of a long step"
    )
    parser.add_argument("--keep", type=Path, help="leave the logs here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = arguments.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        )
        for part in ("pauses", "emulated", "computed"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        try:
            sys.exit(asyncio.run(run(arguments.tries, arguments.step, directory)))
        except EdgeShardError as error:
            sys.exit(f"the site did not serve: {error.message}")


if __name__ == "__main__":
    main()
