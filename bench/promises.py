"""Plans against reality: two real agents of one pinned core each, measured and planned by the product itself.

A random Llama of 316 M parameters in bfloat16 is profiled by both boxes (`edgectl profile`), then deployed for one
request at a time: in halves by hand, and planned with the objectives `request` and `ttft` for prompts of 64, 1,024 and
3,000 tokens. What a client sees is compared with what the deployment promises. Then the requests of one deployment
change from short prompts to long ones: what its outlook promises of another placement is compared with what the
same requests gain once it was deployed again.

    python -m bench.promises [-o FILE] [--rounds 5] [--quick]    JSON; tables of it on stderr
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engine_site import LAYERS, NODES, prompt_of, write_model
from bench.pinning import started
from bench.random_llama import RandomWeights
from edgeshard.cli.local import LocalCluster
from edgeshard.client import Client
from edgeshard.domain.deployment import Deployment, parse_spec
from edgeshard.domain.generation import Token
from edgeshard.domain.placement import Prediction

MODEL = "llama-316m"
NAME = "promised"
PROMPTS = (64, 1024, 3000)
NEW_TOKENS = 32
SHORT, LONG = (32, 160), (3000, 16)
"""Prompt and answer of the requests that change."""
MAX_CONTEXT = 4096
LIMIT = 0.15
_DEPLOY_S = 180.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a client saw of one request, in seconds; `per_token_s` is the median gap."""

    ttft_s: float
    per_token_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A deployment's promise and the medians of what was measured."""

    case: str
    placement: str
    promised: Served
    measured: Served

    @property
    def off(self) -> dict[str, float]:
        """(promised - measured) / measured."""
        measured = asdict(self.measured)
        return {name: value / measured[name] - 1 for name, value in asdict(self.promised).items()}


class Promises:
    """A site and the requests sent to it."""

    def __init__(self, client: Client, rounds: int) -> None:
        self._client, self._rounds = client, rounds
        self._sent = 0

    async def profile(self, quick: bool) -> None:
        """As an operator has boxes measured: those that were disturbed are measured again. Raises a box's error."""
        async with aclosing(self._client.profile(MODEL, quick=quick)) as telling:
            async for progress in telling:
                if progress.failure is not None:
                    raise progress.failure

    async def row(self, case: str, prompt_tokens: int, **spec: Any) -> Row:
        """Deploy, measure, delete."""
        lengths = {"prompt_tokens": prompt_tokens, "new_tokens": NEW_TOKENS}
        deployment = await self.deploy(**lengths, **spec)
        measured = await self.requests(prompt_tokens, NEW_TOKENS, self._rounds)
        await self.delete()
        return tell(Row(case, placed(deployment), promised(deployment.placement.predicted), measured))

    async def deploy(self, **spec: Any) -> Deployment:
        values = {"name": NAME, "model": MODEL, "source": NODES[0], "dtype": "bfloat16", "concurrency": 1}
        values |= {"max_context": MAX_CONTEXT, "objective": "request", **spec}
        deployment = await self._client.deploy(parse_spec(values), timeout_s=_DEPLOY_S)
        await self.request(16, 4)  # Weights that nobody has read for a while are slow at first.
        return deployment

    async def delete(self) -> None:
        await self._client.delete_deployment(NAME, timeout_s=_DEPLOY_S)

    async def outlook(self) -> Deployment:
        return await self._client.deployment(NAME, outlook=True)

    async def requests(self, prompt_tokens: int, new_tokens: int, count: int) -> Served:
        """The medians of so many, one after the other."""
        served = [await self.request(prompt_tokens, new_tokens) for _ in range(count)]
        columns = zip(*(asdict(item).values() for item in served), strict=True)
        return Served(*(statistics.median(column) for column in columns))

    async def request(self, prompt_tokens: int, new_tokens: int) -> Served:
        self._sent += 1
        began, arrivals = time.perf_counter(), list[float]()
        prompt = prompt_of(self._sent, prompt_tokens)
        events = self._client.generate(NAME, prompt, max_new_tokens=new_tokens, ignore_eos=True)
        async with aclosing(events) as stream:
            async for event in stream:
                if isinstance(event, Token):
                    arrivals.append(time.perf_counter())
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        return Served(arrivals[0] - began, statistics.median(gaps), arrivals[-1] - began)


def promised(prediction: Prediction | None) -> Served:
    assert prediction is not None, "both boxes were measured"
    return Served(prediction.time_to_first_token_s, prediction.time_per_token_s, prediction.request_s)


def placed(deployment: Deployment) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in deployment.placement.stages)


def tell(row: Row) -> Row:
    figures = ", ".join(
        f"{name} {1000 * value:.1f} ms ({100 * row.off[name]:+.1f} %)" for name, value in asdict(row.measured).items()
    )
    print(f"{row.case} {row.placement}: {figures}", file=sys.stderr, flush=True)
    return row


async def changing(site: Promises, rounds: int) -> dict[str, Any]:
    """Short prompts, then long ones, on one deployment that was given no lengths; then it is deployed again.

    The deployment is planned for what it served before, as one is that has run for a while.
    """
    await site.deploy()
    for _ in range(rounds):
        await site.request(*SHORT)
    await site.delete()
    first = await site.deploy()
    quiet = await site.outlook()
    before = await site.requests(*LONG, 4 * rounds)
    asked = await site.outlook()
    outlook = asked.outlook
    assert outlook is not None and outlook.expected is not None
    seen = (round(asked.traffic.prompts.mean), round(asked.traffic.answers.mean))
    await site.delete()
    again = await site.deploy()
    mean_before_is = {"short": SHORT, "long": LONG, "seen": seen}
    after = await site.requests(*LONG, rounds)
    at_seen = await site.requests(*seen, rounds)
    await site.delete()
    await site.deploy(layers=placed(first))
    was_at_seen = await site.requests(*seen, rounds)
    await site.delete()
    gain = 1 - at_seen.request_s / was_at_seen.request_s
    result = {
        "lengths": mean_before_is,
        "placement": placed(first),
        "said_while_short": quiet.outlook is not None and quiet.outlook.better is not None,
        "said_once_long": outlook.better is not None,
        "promised_gain": outlook.gain,
        "gain": gain,
        "expected_s": outlook.expected.request_s,
        "was_s": was_at_seen.request_s,
        "better_s": outlook.better.request_s if outlook.better is not None else None,
        "is_s": at_seen.request_s,
        "long_requests_s": [before.request_s, after.request_s],
        "placement_again": placed(again),
    }
    print(json.dumps(result, indent=1), file=sys.stderr, flush=True)
    return result


async def run(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    write_model(scratch / "model", RandomWeights())
    cluster = LocalCluster(scratch, NODES, threads=1)
    async with started(cluster, (0, 1)) as running, Client(running.address) as client:
        await client.add_model(scratch / "model", MODEL)
        site = Promises(client, arguments.rounds)
        await site.profile(arguments.quick)
        halves = f"{NODES[0]}=0:{LAYERS // 2},{NODES[1]}={LAYERS // 2}:{LAYERS}"
        rows = [await site.row(f"halves {PROMPTS[1]}", PROMPTS[1], layers=halves)]
        for objective, prompt_tokens in itertools.product(("request", "ttft"), PROMPTS):
            rows.append(await site.row(f"{objective} {prompt_tokens}", prompt_tokens, objective=objective))
        change = await changing(site, arguments.rounds)
    return {
        "benchmark": "promises",
        "rows": [asdict(row) | {"off": row.off} for row in rows],
        "changing": change,
        "within_limit": kept(rows, change),
        "load_1_minute": os.getloadavg()[0],
    }


def kept(rows: Sequence[Row], change: dict[str, Any]) -> bool:
    """Whether every promise of an objective's own figure is within `LIMIT`, and so is the gain's."""
    own = {"request": "request_s", "ttft": "ttft_s", "halves": "request_s"}
    figures = [row.off[own[row.case.split()[0]]] for row in rows]
    return change["said_once_long"] and all(
        abs(value) <= LIMIT for value in (*figures, change["gain"] / (change["promised_gain"] or 1.0) - 1)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="measure the boxes quickly")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-promises-") as scratch:
        report = asyncio.run(run(arguments, Path(scratch)))
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0 if report["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
