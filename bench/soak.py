"""A soak: a real site under modest, random load for long, and whether it holds at the end what it
held at the start.

A coordinator and three nodes run the demo model with a small KV pool, overcommitted, with a prefix
cache. Requests arrive in groups at random times: greedy and sampled, short and long prompts, some
that begin alike. Some clients cancel, leave in the middle, read slowly or have too little time.
After a few groups everything may end, and the KV in use must be zero on every node. The start
records the answer of each request when it runs by itself, and its tokens must be equal each time.

Resident memory, threads and open files of every process are sampled. After warm-up, memory must be
flat: it grows by less than 1 MiB in ten minutes by least squares (`bench/flatness.py`). Runs too
short to say are not judged by that. No log may grow by more than 10 KiB a minute, which is 14 MiB a
day.

    python -m bench.soak [--minutes 30] [-o FILE]

writes JSON to FILE or stdout. It exits with 1 if something grew or failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil

from bench.flatness import MIB, ProcessSample, Sample, growth, problems
from bench.sites import demo_site
from bench.sizes import sized
from edgeshard.cli.commands.site.demo import even_layers
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import DeadlineError, EdgeShardError, ResourceExhaustedError
from edgeshard.domain.requests.generation import GenerateOptions, Token
from tests.support.load import Stream
from tests.support.site import Site, processor_s

NODES = ("a", "b", "c")
VOCABULARY = 4096
"""The demo model's."""
DEPLOYMENT = "soak"
MAX_CONTEXT = 256
CONCURRENCY = 2
GROUPS_PER_ROUND = 4
MOST_AT_ONCE = 8
"""Requests of a group: four run side by side, with prompts and answers that together may exceed the
KV pool."""
MAX_LOG_BYTES_PER_MINUTE = 10 << 10
KV_GONE_S = 20.0
"""After the last request of a round: far more than it takes, and a leak never goes."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request with its right answer."""

    prompt: tuple[int, ...]
    options: GenerateOptions
    answer: tuple[int, ...] = ()


def questions(chance: random.Random, count: int = sized(32, 4)) -> list[Question]:
    """Prompts of 2 to 190 tokens, some with one of three beginnings; answers of 4 to 64, a third of
    them sampled."""
    beginnings = [[chance.randrange(3, VOCABULARY) for _ in range(96)] for _ in range(3)]
    made = []
    for number in range(count):
        tail = [chance.randrange(3, VOCABULARY) for _ in range(chance.choice((2, 9, 30, 90)))]
        prompt = tail if number % 2 else [*chance.choice(beginnings), *tail]
        options = GenerateOptions(max_new_tokens=chance.randint(4, 64), ignore_eos=True)
        if number % 3 == 0:
            options |= GenerateOptions(temperature=0.8, top_p=0.95, seed=number)
        made.append(Question(tuple(prompt), options))
    return made


class Load:
    """Random clients: `outcomes` counts their outcomes, `wrong` describes each failure."""

    def __init__(self, client: Client, chance: random.Random, asked: Sequence[Question]) -> None:
        self._client = client
        self._chance = chance
        self._questions = asked
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.wrong: list[str] = []
        self.active = 0

    async def learn(self) -> None:
        """Send each question by itself, for the right answers."""
        self._questions = [
            Question(
                q.prompt,
                q.options,
                (await self._client.complete(DEPLOYMENT, q.prompt, **q.options)).token_ids,
            )
            for q in self._questions
        ]

    async def round(self, gap_s: float) -> None:
        """Some groups of requests, `gap_s` apart on average; returns when all have ended."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(GROUPS_PER_ROUND):
                for _ in range(self._chance.randint(1, MOST_AT_ONCE)):
                    clients.create_task(
                        self._visit(self._chance.choice(self._questions), self._chance.random())
                    )
                await asyncio.sleep(self._chance.expovariate(1 / gap_s))

    async def _visit(self, question: Question, manner: float) -> None:
        """`manner`, from 0 to 1, is how this client behaves: most of them read to the end."""
        await asyncio.sleep(self._chance.uniform(0.0, 0.2))
        self.active += 1
        try:
            if manner < 0.6:
                outcome = await self._read(question, len(question.answer))
            elif manner < 0.7:
                outcome = await self._read(question, len(question.answer), pause_s=0.02)
            elif manner < 0.8:
                outcome = await self._read(question, self._chance.randrange(len(question.answer)))
            elif manner < 0.9:
                outcome = await self._cancel(question)
            else:
                outcome = await self._read(question, len(question.answer), timeout_s=0.05)
        except DeadlineError:
            outcome = "out of time"
        except ResourceExhaustedError:
            outcome = "refused"
        except EdgeShardError as error:  # the others continue, and the report lists it
            outcome = "failed"
            self.wrong.append(f"a request failed: {error.message}")
        finally:
            self.active -= 1
        self.outcomes[outcome] += 1

    async def _read(
        self, question: Question, count: int, pause_s: float = 0.0, timeout_s: float | None = None
    ) -> str:
        """Read `count` tokens and leave."""
        stream = Stream(
            DEPLOYMENT, question.prompt, question.options | GenerateOptions(timeout_s=timeout_s)
        )
        async with aclosing(stream.follow(self._client)) as events:
            async for event in events:
                if isinstance(event, Token):
                    await asyncio.sleep(pause_s)
                if len(stream.tokens) > count:
                    break
        self._check(question, stream)
        return "finished" if len(stream.tokens) == len(question.answer) else "left"

    async def _cancel(self, question: Question) -> str:
        """From another call, after the first token or, at times, before."""
        name = f"soak-{self._chance.getrandbits(64):x}"
        after = self._chance.randrange(2)
        stream = Stream(
            DEPLOYMENT, question.prompt, question.options | GenerateOptions(request_id=name)
        )
        async for _ in stream.follow(self._client):
            if len(stream.tokens) == after:
                await self._client.cancel(name)
        self._check(question, stream)
        return "cancelled"

    def _check(self, question: Question, stream: Stream) -> None:
        stream.raise_error()
        self.tokens += len(stream.tokens)
        if stream.ids != question.answer[: len(stream.tokens)]:
            number, first = self._questions.index(question), _differ(stream.ids, question.answer)
            self.wrong.append(f"question {number} got other tokens than alone, from token {first}")


def _differ(tokens: Sequence[int], answer: Sequence[int]) -> int:
    return next(
        (i for i, (t, a) in enumerate(zip(tokens, answer, strict=False)) if t != a), len(answer)
    )


class Gauges:
    """Reads the site's processes from the system, and its KV from the coordinator."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._processes = {name: psutil.Process(pid) for name, pid in site.pids().items()}
        self._processes["client"] = psutil.Process(os.getpid())

    async def sample(self, at_s: float, requests: int) -> Sample:
        processes = {
            name: ProcessSample(process.memory_info().rss, process.num_threads(), process.num_fds())
            for name, process in self._processes.items()
        }
        return Sample(at_s, processes, await self._site.kv_bytes(), requests)

    def log_bytes(self) -> dict[str, int]:
        """The size of each daemon's log."""
        return {name: daemon.log_path.stat().st_size for name, daemon in self._site.daemons.items()}

    async def kv_gone(self) -> bool:
        """Whether every node reports, from now on and within KV_GONE_S, that it holds no KV."""
        try:
            await self._site.kv_gone(KV_GONE_S, poll_s=0.1)
        except TimeoutError:
            return False
        return True

    def processor_s(self) -> float:
        return processor_s([self._site])


def _spec(layer_count: int) -> dict[str, object]:
    return {
        "name": DEPLOYMENT,
        "model": "demo",
        "source": NODES[0],
        "dtype": "float32",
        "layers": even_layers(layer_count, NODES),
        "concurrency": CONCURRENCY,
        "max_context": MAX_CONTEXT,
        "kv_overcommit": True,
        "prefix_cache": True,
    }


async def soak(minutes: float, gap_s: float, sample_s: float, seed: int) -> dict[str, Any]:
    """Run it; the report as JSON types."""
    async with demo_site(NODES) as site:
        client = site.client
        stored = await client.stored_model("demo")
        await client.deploy(parse_spec(_spec(stored.layer_count)), timeout_s=120)
        chance = random.Random(seed)
        load = Load(client, chance, questions(chance))
        await load.learn()
        return await _watched(load, Gauges(site), minutes * 60, gap_s, sample_s)


async def _watched(
    load: Load, gauges: Gauges, seconds: float, gap_s: float, sample_s: float
) -> dict[str, Any]:
    samples: list[Sample] = []
    began_s, processor_s = time.monotonic(), gauges.processor_s()
    log_bytes = gauges.log_bytes()

    async def watch() -> None:
        while True:
            samples.append(await gauges.sample(time.monotonic() - began_s, load.active))
            await asyncio.sleep(sample_s)

    rounds, kv_left = 0, 0
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        while time.monotonic() - began_s < seconds:
            await load.round(gap_s)
            rounds += 1
            kv_left += not await gauges.kv_gone()
        watching.cancel()
    samples.append(await gauges.sample(time.monotonic() - began_s, load.active))
    found = [*problems(samples), *load.wrong[:10]]
    if kv_left:
        found.append(
            f"KV was still in use after {kv_left} of {rounds} rounds, with no request running"
        )
    grew = growth(samples)
    log_growth = {name: size - log_bytes[name] for name, size in gauges.log_bytes().items()}
    allowed = MAX_LOG_BYTES_PER_MINUTE * max(1.0, samples[-1].at_s / 60)
    found += [
        f"the log of {name} grew by {size} bytes"
        for name, size in log_growth.items()
        if size > allowed
    ]
    return {
        "benchmark": "soak",
        "seconds": samples[-1].at_s,
        "processor_share": (gauges.processor_s() - processor_s) / samples[-1].at_s,
        "rounds": rounds,
        "requests": dict(load.outcomes),
        "tokens": load.tokens,
        "wrong": len(load.wrong),
        "rounds_with_kv_left": kv_left,
        "memory_judged": bool(grew),
        "growth_mib_per_10_minutes": {name: rate * 600 / MIB for name, rate in grew.items()},
        "log_growth_bytes": log_growth,
        "problems": found,
        "samples": [asdict(sample) for sample in samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="how long; memory is judged from 14 on"
    )
    parser.add_argument(
        "--gap", type=float, default=6.0, metavar="SECONDS", help="mean time between groups"
    )
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="SECONDS", help="time between samples"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the load")
    parser.add_argument("-o", "--output", type=Path, help="JSON goes here instead of stdout")
    options = parser.parse_args()
    # Opened first: a path that cannot be written should not cost half an hour.
    with (
        nullcontext(sys.stdout)
        if options.output is None
        else options.output.open("w", encoding="utf-8") as file
    ):
        report = asyncio.run(soak(options.minutes, options.gap, options.every, options.seed))
        json.dump(report, file, indent=2)
        file.write("\n")
    print(_verdict(report), file=sys.stderr)
    return 1 if report["problems"] else 0


def _verdict(report: dict[str, Any]) -> str:
    if report["problems"]:
        return "not flat: " + "; ".join(report["problems"])
    name, size = max(report["log_growth_bytes"].items(), key=itemgetter(1))
    logs = f"logs grew by at most {size} bytes ({name})"
    if not report["memory_judged"]:
        return f"nothing wrong; too short a run to say whether memory is flat; {logs}"
    most = max(report["growth_mib_per_10_minutes"].values())
    return (
        f"flat: no process grew by more than {most:.2f} MiB in ten minutes, KV went back to "
        f"zero every time, {logs}"
    )


if __name__ == "__main__":
    sys.exit(main())
