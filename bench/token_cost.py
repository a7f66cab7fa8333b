"""Measure a token's cost besides its computing: processor time of the client, the coordinator and
the nodes.

Two real agents serve the random Llama of `bench/random_llama.py`, whole on one node or in halves on
both, to 1, 8 and 16 streams of one client. Processor time is the kernel's count, to the nanosecond,
of each process. An agent's compute thread is counted apart: it is the one that used most. Prompts
and first tokens are left out, because counting begins when all streams generate. With another
checkout the two trees take turns, in their own virtual environments.

`step_gap_ms` is from the end of computing on a stage to the next computing anywhere, by the nodes'
own clocks (a trace). For one stage it is from a step's end to the next step's start, for two stages
it is each hop.

    python -m bench.token_cost [--rounds 5] [--streams N ...] [-o FILE]
        JSON: a row a case
    git worktree add ../before REVISION && make -C ../before setup
    python -m bench.token_cost --before ../before
        both trees' rows, in turns
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine import hold
from bench.engine_site import PinnedSite, Setup, prompt_of
from bench.lines import Tree
from bench.sites import write_rows
from edgeshard.domain.requests.generation import Token

STREAMS = (1, 8, 16)
PROMPT_TOKENS = 16
NEW_TOKENS = 64
MOST_TOKENS = 480
TRACE_S = 1.5
"""Long enough for four steps of 16 streams on a slow processor."""


def thread_seconds(pid: int) -> dict[int, float]:
    """Processor seconds so far of each thread, without those that only keep cores awake."""
    used = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if os.sched_getscheduler(int(thread.name)) == os.SCHED_IDLE:
            continue
        used[int(thread.name)] = (
            int((thread / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        )
    return used


class Processes:
    """The processor time of a site's processes and of this one, the client."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = {**pids, "client": os.getpid()}
        self._before = self._read()

    def _read(self) -> dict[str, dict[int, float]]:
        return {name: thread_seconds(pid) for name, pid in self._pids.items()}

    def used_s(self) -> dict[str, float]:
        """Seconds of each process since the beginning; of agents without the thread that used
        most."""
        used = {}
        for name, threads in self._read().items():
            spent = sorted(
                seconds - self._before[name].get(thread, 0.0) for thread, seconds in threads.items()
            )
            used[name] = sum(spent if name in ("client", "coordinator") else spent[:-1])
        return used


async def work() -> None:
    """A worker: the site of this process's tree, at the commands of standard input."""
    setups = {1: Setup(1), 2: Setup(2, micro_batches=1)}
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-token-") as scratch:
        async with PinnedSite(Path(scratch)) as site:
            await hold(site, list(setups.values()), ())
            while line := await asyncio.to_thread(sys.stdin.readline):
                stages, streams = json.loads(line)
                figures = await measure(site, setups[stages], streams)
                print(json.dumps(figures), flush=True)


async def measure(site: PinnedSite, setup: Setup, streams: int) -> dict[str, float]:
    """Milliseconds of processor time a token by process, the gaps between steps, and tokens per
    second."""
    await site.warm_up(setup)
    daemons = {**site.cluster.agents, "coordinator": site.cluster.coordinator}
    pids = {name: daemon.pid for name, daemon in daemons.items() if daemon.pid is not None}
    tokens = 0
    firsts = 0
    wanted = 0
    going = asyncio.Event()
    enough = asyncio.Event()
    done = asyncio.Event()

    async def stream(number: int) -> None:
        nonlocal tokens, firsts
        heard = 0
        prompt = prompt_of(number, PROMPT_TOKENS)
        events = site.client.generate(
            setup.name, prompt, max_new_tokens=MOST_TOKENS, ignore_eos=True
        )
        async with aclosing(events) as telling:
            async for event in telling:
                if isinstance(event, Token):
                    tokens += 1
                    heard += 1
                    if tokens == wanted:
                        enough.set()
                    if heard == 3:
                        firsts += 1
                        if firsts == streams:
                            going.set()
                    if done.is_set():
                        return

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    await asyncio.wait_for(going.wait(), 120)
    begun = tokens
    began = time.perf_counter()
    processes = Processes(pids)
    wanted = begun + NEW_TOKENS * min(streams, 4)
    await enough.wait()
    used = processes.used_s()
    count = tokens - begun
    seconds = time.perf_counter() - began
    while not has_pairs(traces := await site.client.trace(setup.name, TRACE_S)):
        if any(task.done() for task in tasks):
            raise RuntimeError("the streams ended before they were traced")
    done.set()
    await asyncio.gather(*tasks)
    figures = {f"{name}_ms": 1000 * value / count for name, value in used.items()}
    return {**figures, "step_gap_ms": 1000 * gap_s(traces), "tokens_per_s": count / seconds}


def has_pairs(traces: Sequence[Any]) -> bool:
    return all(len(trace.records) > 3 for trace in traces)


def gap_s(traces: Sequence[Any]) -> float:
    """Median seconds between computing and the next computing, one step after the other (one
    micro-batch)."""
    if len(traces) == 1:
        records = traces[0].records
        return float(
            statistics.median(
                later.began_s - earlier.ended_s for earlier, later in pairwise(records)
            )
        )
    # Clocks are not compared: a round on the first node, minus the computing of the second.
    first, second = ({record.step: record for record in trace.records} for trace in traces)
    rounds = [
        first[step + 1].began_s - record.ended_s - (second[step].ended_s - second[step].began_s)
        for step, record in first.items()
        if step + 1 in first and step in second
    ]
    return float(statistics.median(rounds) / 2)


def compare(
    trees: dict[str, Tree], stages: Sequence[int], streams: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Medians of each case and tree; the trees take turns."""
    samples: dict[tuple[int, int, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for stage_count in stages:
            for count in streams:
                turns = list(trees.items())
                for name, tree in turns if number % 2 == 0 else reversed(turns):
                    figures = tree.ask([stage_count, count])
                    samples.setdefault((stage_count, count, name), []).append(figures)
                    told = " ".join(f"{key} {value:.3f}" for key, value in figures.items())
                    print(
                        f"{number + 1}/{rounds} s{stage_count} x{count} {name}: {told}",
                        file=sys.stderr,
                        flush=True,
                    )
    return [
        {
            "stages": stage_count,
            "streams": count,
            "tree": name,
            **{key: statistics.median(figures[key] for figures in found) for key in found[0]},
            "load_1_minute": os.getloadavg()[0],
        }
        for (stage_count, count, name), found in samples.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, set up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--stages", type=int, action="append", choices=(1, 2), help="this many only"
    )
    parser.add_argument("--streams", type=int, action="append", help="this many only; repeat")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work())
        return 0
    roots = {"after": Path(__file__).parents[1]}
    if options.before is not None:
        roots = {"before": options.before, **roots}
    with ExitStack() as stack:
        trees = {
            name: stack.enter_context(Tree(root, "bench.token_cost"))
            for name, root in roots.items()
        }
        report = compare(
            trees, options.stages or (1, 2), options.streams or STREAMS, options.rounds
        )
    for row in report:
        print(
            json.dumps(
                {
                    key: round(value, 3) if isinstance(value, float) else value
                    for key, value in row.items()
                }
            )
        )
    write_rows(options.output, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
