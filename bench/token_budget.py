"""The time of one token, part by part, at one stream over two nodes:
`python -m bench.token_budget`.

Two real agents of one core each serve the random Llama of `bench/random_llama.py` in halves, at
sites that speak over TLS and in plaintext, in turns. The nodes' trace and each token itself give
the moments at which the token passes from one part to the next
(`edgeshard.domain.requests.trace.StepRecord`); all processes read this machine's one clock. The
parts of a token follow each other without a gap. So they must add up to the time between two
tokens, which the client measures independently. The printed figures are means over the middle half
of the tokens by their whole time, whose parts add up as medians would not. The difference between
their sum and the mean of the middle half of the times between tokens is printed, too.

The way from the head to the client is no part of that time: the next step is under way meanwhile.
It is printed separately, as `delivery_ms`. `tls_ms` is the additional time of the transfers over
TLS. `whole` is the model on one of the nodes, in turns with the others: its layers' time there, and
the time between its tokens.

    python -m bench.token_budget [--rounds 2] [--check] [-o FILE]
        JSON: a row a tree; --check: exit 1 beyond 10 %
    git worktree add ../before REVISION && make -C ../before setup
    python -m bench.token_budget --before ../before
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from bench.engine import hold
from bench.engine_site import PinnedSite, Setup, prompt_of
from bench.lines import Tree
from bench.sites import write_rows
from bench.sizes import sized
from edgeshard.domain.requests.generation import GenerateOptions, Token
from edgeshard.domain.requests.trace import StageTrace, StepRecord
from tests.support.load import Stream

SPLIT, WHOLE = Setup(2, micro_batches=1), Setup(1)
TLS = "tls"
PLAINTEXT = "plaintext"
ALONE = "whole"
KINDS = (TLS, PLAINTEXT, ALONE)
PROMPT_TOKENS = 16
WARM_TOKENS = 4
MOST_TOKENS = 480
TRACE_S = sized(3.0, 0.5)
TIMES = sized(3, 1)
"""How often a site is measured before it ends."""
CHECKED = 0.1
"""Allowed distance of the sum from the measured time, as a fraction of that."""

PARTS = {
    "compute": "the layers and the sampler",
    "framing": "the result as bytes: tensor, protobuf, checksum",
    "to_the_loop": "from the compute thread to the event loop",
    "transfer": "gRPC and TLS with their threads on both sides, and the receiver's turns of the "
    "event loop",
    "taking_apart": "the frame as values: checksum, protobuf, checks",
    "scheduling": "the head takes the token and forms the next step",
    "to_the_thread": "from the event loop to the compute thread",
}
"""The parts of a token's time; each but `scheduling` is there on both nodes, and is their sum
here."""

Item = TypeVar("Item")
Came = tuple[float, Token]
"""When a token was with its client, in seconds of this machine's clock, and the token."""


def parts_of(traces: Sequence[StageTrace], tokens: Sequence[Came]) -> Iterator[dict[str, float]]:
    """Seconds of each part, and of the delivery, for each token whose parts are all known.

    A token belongs to the step that the head had back last before it took the token (`at_s`).
    """
    first, second = ({record.step: record for record in trace.records} for trace in traces)
    returned = sorted(
        (record.returned_s, step) for step, record in first.items() if record.returned_s
    )
    by_step = {}
    for came_s, token in tokens:
        before = [step for at_s, step in returned if at_s <= token.at_s]
        if before:
            by_step[before[-1]] = came_s, token
    for step, head in first.items():
        last, following = second.get(step), first.get(step + 1)
        if (
            last is None
            or following is None
            or step not in by_step
            or not (head.came_s and last.came_s)
        ):
            continue
        came_s, token = by_step[step]
        computed_s = {timing.stage: timing.compute_s for timing in token.timings}
        yield {
            "compute": computed_s[0] + computed_s[1],
            "framing": _spent(head) + _spent(last) - computed_s[0] - computed_s[1],
            "to_the_loop": head.sent_s - head.ended_s + last.sent_s - last.ended_s,
            "transfer": last.came_s - head.sent_s + head.came_s - last.sent_s,
            "taking_apart": last.arrived_s - last.came_s + head.returned_s - head.came_s,
            "scheduling": following.arrived_s - head.returned_s,
            "to_the_thread": following.began_s
            - following.arrived_s
            + last.began_s
            - last.arrived_s,
            "delivery": came_s - token.at_s,
        }


def _spent(record: StepRecord) -> float:
    return record.ended_s - record.began_s


async def measure(site: PinnedSite, setup: Setup) -> dict[str, float]:
    """Milliseconds of the tokens in the middle: each part, their `sum`, and the time `between`
    tokens. For a whole model only the computing is separated from the rest."""
    traces, came = await traced(site, setup)
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(came[WARM_TOKENS:])]
    if setup is WHOLE:
        found = {
            "compute": mean_of_middle(
                [token.timings[0].compute_s for _, token in came[WARM_TOKENS:]]
            )
        }
    else:
        known = list(parts_of(traces, came))
        if not known:
            raise RuntimeError("no token was traced from its beginning to its end")
        parts = middle(known, lambda token: sum(token[name] for name in PARTS))
        found = {name: statistics.fmean(token[name] for token in parts) for name in parts[0]}
        found["sum"] = sum(found[name] for name in PARTS)
    found["between"] = mean_of_middle(gaps)
    return {f"{name}_ms": 1000 * seconds for name, seconds in found.items()}


def middle(items: Sequence[Item], size: Callable[[Item], float]) -> list[Item]:
    """The middle half of them by `size`; at least one."""
    quarter = (len(items) - 1) // 4
    return sorted(items, key=size)[quarter : len(items) - quarter]


def mean_of_middle(values: Sequence[float]) -> float:
    return statistics.fmean(middle(values, float))


async def traced(site: PinnedSite, setup: Setup) -> tuple[Sequence[StageTrace], list[Came]]:
    """A trace of one stream, and its tokens from their first until the trace's end."""
    options = GenerateOptions(max_new_tokens=MOST_TOKENS, ignore_eos=True)
    streams = [Stream(setup.name, prompt_of(0, PROMPT_TOKENS), options)]

    async def listen() -> None:
        # One request after the other: tokens around their ends are not among those in the middle.
        while True:
            (await streams[-1].run(site.client)).raise_error()
            streams.append(Stream(setup.name, prompt_of(0, PROMPT_TOKENS), options))

    listening = asyncio.create_task(listen())
    try:
        await asyncio.wait_for(streams[0].has(WARM_TOKENS), 120)
        traces = await site.client.trace(setup.name, TRACE_S)
        if listening.done():
            listening.result()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return traces, [
        came for stream in streams for came in zip(stream.times[1:], stream.tokens, strict=True)
    ]


async def work() -> None:
    """A worker: a site of this process's tree for each line of standard input, which names its
    kind."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await measure_site(json.loads(line))), flush=True)


async def measure_site(kind: str) -> dict[str, list[dict[str, float]]]:
    """The results of `measure` at one site over TLS or in plaintext, several times. One site is
    there at a time: nodes without work measure themselves, which would disturb another's."""
    setups = {TLS: SPLIT, ALONE: WHOLE} if kind == TLS else {PLAINTEXT: SPLIT}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in setups}
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-budget-") as scratch:
        async with PinnedSite(Path(scratch), secure=kind == TLS) as site:
            await hold(site, list(setups.values()), ())
            for _ in range(TIMES):
                for name, setup in setups.items():
                    await site.warm_up(setup)
                    found[name].append(await measure(site, setup))
    return found


def compare(trees: Mapping[str, Tree], rounds: int) -> list[dict[str, object]]:
    """A row for each tree: medians over TLS, and the additional time of transfers over TLS."""
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        turns = [(name, kind) for name in trees for kind in (TLS, PLAINTEXT)]
        for name, asked in turns if number % 2 == 0 else reversed(turns):
            for kind, found in trees[name].ask(asked).items():
                samples.setdefault((name, kind), []).extend(found)
                for figures in found:
                    told = " ".join(f"{key} {value:.3f}" for key, value in figures.items())
                    print(
                        f"{number + 1}/{rounds} {name} {kind}: {told}", file=sys.stderr, flush=True
                    )
    return [row_of(name, {kind: samples[name, kind] for kind in KINDS}) for name in trees]


def row_of(tree: str, samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, object]:
    """The figures of one tree, from its rounds' figures by kind of site. A hop is all between two
    computings, halved since a token makes two."""
    medians = {
        kind: {key: statistics.median(figures[key] for figures in found) for key in found[0]}
        for kind, found in samples.items()
    }
    secure, plain, whole = (medians[kind] for kind in KINDS)
    hops = {
        kind: (
            medians[kind]["sum_ms"] - medians[kind]["compute_ms"] - medians[kind]["scheduling_ms"]
        )
        / 2
        for kind in (TLS, PLAINTEXT)
    }
    return {
        "tree": tree,
        **secure,
        "hop_ms": hops[TLS],
        "hop_plaintext_ms": hops[PLAINTEXT],
        "tls_ms": secure["transfer_ms"] - plain["transfer_ms"],
        "whole_compute_ms": whole["compute_ms"],
        "whole_between_ms": whole["between_ms"],
        "of_whole": whole["between_ms"] / secure["between_ms"],
        "off": statistics.median(
            figures["sum_ms"] / figures["between_ms"] - 1 for figures in samples[TLS]
        ),
        "load_1_minute": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, set up")
    parser.add_argument("--rounds", type=int, default=2, help="sites of each kind and tree")
    parser.add_argument("--check", action="store_true", help="exit 1 when the parts do not add up")
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
            name: stack.enter_context(Tree(root, "bench.token_budget"))
            for name, root in roots.items()
        }
        report = compare(trees, options.rounds)
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
    wrong = [row for row in report if abs(float(str(row["off"]))) > CHECKED]
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
