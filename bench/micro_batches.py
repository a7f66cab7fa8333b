"""Does the head choose the number of micro-batches well? Its choice beside every fixed number, in turns.

A model is deployed in two stages with m = 1, 2 and 3 fixed, and with m left to the head (`micro_batches` 0). At each
number of streams the four take turns, and who begins changes with every round. A rate is of the time at which all
streams generate; what the head's trials of other numbers take is in it.

Two real agents of one thread and one core each run the random Llama of `bench/random_llama.py`. With `--lab` they
pretend to be two nodes of known speed, so that other load on the machine hardly matters: once with equal stages, and
once with one stage that takes three times as long as the other, where few streams are best off as one micro-batch.

`of_theory` is what m = 2 with b = 8 (16 streams) reaches of m b / max(R, m B): B is the longest stage and R the round
of one micro-batch, of a trace within the same run. Clocks of nodes need not agree: hops are what a round takes beyond
computing, waiting and sending.

    python -m bench.micro_batches [--rounds 5] [--profile] [--lab] [-o FILE]     JSON: a row for each number of streams
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
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.engine import site_with
from bench.engine_site import MODEL, Setup
from bench.engine_streams import Arrival, Stream, sample_of
from bench.random_llama import RandomWeights
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.requests.generation import Token
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.local.lab_site import lab_cluster, make_stand_in
from edgeshard.planning.simulation.lab import parse_lab

CHOICES = {"m1": 1, "m2": 2, "m3": 3, "auto": 0}
STREAMS = (1, 2, 4, 8, 12, 16)
PROMPT_TOKENS = 32
VOCABULARY = 60
"""Token ids below this are in every model's vocabulary."""
TRACED = ("m2", 16)
_TRACE_S = 1.0

LAB = """
source = "a"
[[device]]
name = "a"
memory_bytes = 16e9
bandwidth_bytes_per_s = 10e9
flops = 0.15e12
[[device]]
name = "b"
memory_bytes = 16e9
bandwidth_bytes_per_s = 10e9
flops = 0.15e12
[[link]]
bandwidth_bps = 1e9
latency_s = 0.001
[model]
dtype = "bfloat16"
[workload]
prompt_tokens = 32
new_tokens = 128
[lab]
model = "config.json"
"""
LAB_CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}
LAB_CUTS = {"equal": 6, "uneven": 9}


@asynccontextmanager
async def real_site(scratch: Path) -> AsyncIterator[tuple[Client, dict[str, dict[str, Any]]]]:
    """A client of the site, and the specs of its pipelines without m by name."""
    async with site_with(RandomWeights(), scratch) as site:
        yield site._client, {"llama": {**Setup(2).spec(), "max_new_tokens": 480}}
        site.pin()


@asynccontextmanager
async def lab_site(scratch: Path) -> AsyncIterator[tuple[Client, dict[str, dict[str, Any]]]]:
    """The same of nodes that pretend."""
    (scratch / "config.json").write_text(json.dumps(LAB_CONFIG), encoding="utf-8")
    (scratch / "lab.toml").write_text(LAB, encoding="utf-8")
    lab = parse_lab(tomllib.loads(LAB), lambda name: LAB_CONFIG)
    make_stand_in(lab, scratch / "stand-in")
    async with (
        lab_cluster(lab, scratch / "lab.toml", scratch) as cluster,
        Client(cluster.address, plaintext=True) as client,
    ):
        await client.add_model(scratch / "stand-in", MODEL)
        common = {"model": MODEL, "source": "a", "dtype": "float32", "concurrency": 16, "max_context": 512}
        yield client, {name: {**common, "layers": f"a=0:{cut},b={cut}:12"} for name, cut in LAB_CUTS.items()}


async def stream(client: Client, deployment: str, number: int, new_tokens: int) -> Stream:
    prompt = [(7 * number + 31 * position + position * position) % VOCABULARY for position in range(PROMPT_TOKENS)]
    began, arrivals = time.perf_counter(), list[Arrival]()
    async with aclosing(client.generate(deployment, prompt, max_new_tokens=new_tokens, ignore_eos=True)) as events:
        async for event in events:
            if isinstance(event, Token):
                arrivals.append(Arrival(time.perf_counter(), event.timings))
    return Stream(began, tuple(arrivals))


async def measure(client: Client, deployment: str, streams: int, new_tokens: int) -> float:
    """Tokens per second."""
    await stream(client, deployment, 0, 4)
    return sample_of(
        await asyncio.gather(*(stream(client, deployment, number, new_tokens) for number in range(streams)))
    ).tokens_per_s


async def measure_traced(client: Client, deployment: str, streams: int, new_tokens: int) -> tuple[float, float]:
    """Tokens per second with m = 2, and what theory says of the stage and hop times of the same run."""
    running = asyncio.create_task(measure(client, deployment, streams, new_tokens))
    while not _has_full_steps(traces := await client.trace(deployment, _TRACE_S), streams // 2):
        if running.done():
            raise RuntimeError("the streams ended before they were traced: ask for more tokens")
    return await running, theory(traces, streams)


def _has_full_steps(traces: Sequence[StageTrace], decodes: int) -> bool:
    return sum(record.tokens == decodes and not record.prompt_tokens for record in traces[0].records) >= 4


def theory(traces: Sequence[StageTrace], streams: int, micro_batches: int = 2) -> float:
    """m b / max(R, m B) of the decode steps of a full micro-batch."""
    size = streams // micro_batches
    steps = [
        {record.step: record for record in trace.records if record.tokens == size and not record.prompt_tokens}
        for trace in traces
    ]
    stage_s = [statistics.median(record.ended_s - record.began_s for record in found.values()) for found in steps]
    both = [(steps[0][step], steps[1][step]) for step in steps[0] if step in steps[1] and steps[0][step].returned_s]
    hops_s = statistics.median(
        (first.returned_s - first.ended_s) - (second.ended_s - second.arrived_s) for first, second in both
    )
    return streams / max(sum(stage_s) + hops_s, micro_batches * max(stage_s))


async def run(
    client: Client, specs: Mapping[str, dict[str, Any]], rounds: int, new_tokens: int, wanted: Sequence[int]
) -> list[dict[str, Any]]:
    rates: dict[tuple[str, int, str], list[float]] = {}
    shares: dict[str, list[float]] = {pipeline: [] for pipeline in specs}
    for pipeline, spec in specs.items():
        for name, micro_batches in CHOICES.items():
            values = {**spec, "name": f"{pipeline}-{name}", "micro_batches": micro_batches}
            await client.deploy(parse_spec(values), timeout_s=180)
    for number in range(rounds):
        for pipeline in specs:
            for streams in wanted:
                for name in CHOICES if number % 2 == 0 else reversed(CHOICES):
                    deployment = f"{pipeline}-{name}"
                    if (name, streams) == TRACED:
                        rate, ideal = await measure_traced(client, deployment, streams, new_tokens)
                        shares[pipeline].append(rate / ideal)
                    else:
                        rate = await measure(client, deployment, streams, new_tokens)
                    rates.setdefault((pipeline, streams, name), []).append(rate)
                    told = f"{number + 1}/{rounds} {deployment} x{streams}: {rate:.1f}"
                    print(told, file=sys.stderr, flush=True)
    return [
        row(pipeline, streams, {name: rates[pipeline, streams, name] for name in CHOICES}, shares[pipeline])
        for pipeline in specs
        for streams in wanted
    ]


def row(pipeline: str, streams: int, rates: dict[str, list[float]], shares: list[float]) -> dict[str, Any]:
    """`of_best` is the median over the rounds of the head's rate over that of the number that is best in all."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in CHOICES if CHOICES[name]), key=lambda name: medians[name])
    ratios = [auto / fixed for auto, fixed in zip(rates["auto"], rates[best], strict=True)]
    found = {
        "pipeline": pipeline,
        "streams": streams,
        "tokens_per_s": {name: round(value, 2) for name, value in medians.items()},
        "best": best,
        "of_best": round(statistics.median(ratios), 4),
        "load_1_minute": os.getloadavg()[0],
    }
    if streams == TRACED[1] and shares:
        found["of_theory"] = round(statistics.median(shares), 4)
    return found


async def main_async(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-micro-") as scratch:
        async with (lab_site if options.lab else real_site)(Path(scratch)) as (client, specs):
            if options.profile:
                async with aclosing(client.profile(MODEL, quick=True)) as telling:
                    async for progress in telling:
                        if progress.failure is not None:
                            raise progress.failure
            return await run(client, specs, options.rounds, options.tokens, options.streams or STREAMS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each stream")
    parser.add_argument("--streams", type=int, action="append", help="this many only; repeat")
    parser.add_argument("--profile", action="store_true", help="have the nodes measure themselves first")
    parser.add_argument("--lab", action="store_true", help="nodes that pretend")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    report = asyncio.run(main_async(options))
    for found in report:
        print(json.dumps(found))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
