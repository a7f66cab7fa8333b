"""Plans against reality: two real agents of one pinned core each, measured and planned by the
product itself.

A random Llama of 316 M parameters in bfloat16 is profiled by both nodes (`edgectl profile`), then
deployed for one request at a time. It is deployed in halves by hand, and planned with the
objectives `request` and `ttft` for prompts of 64, 1,024 and 3,000 tokens. The client's times are
compared with the deployment's promise. Then the requests of one deployment change from short
prompts to long ones. The gain that its outlook promises for another placement is compared with the
gain of the same requests after it was deployed again.

    python -m bench.promises [-o FILE] [--rounds 5] [--quick] [--changing]

prints JSON, and its tables on stderr.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engine_site import LAYERS, MODEL, NODES, PinnedSite, prompt_of
from bench.sites import lab_site, profiled, write_rows
from bench.sizes import sized
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import Deployment, parse_spec
from edgeshard.domain.deployments.placement import Prediction
from edgeshard.domain.models.dtypes import DType
from edgeshard.local.lab_site import VOCABULARY
from tests.support.load import answered

PROMPTS = sized((64, 1024, 3000), (32, 64))
NEW_TOKENS = sized(32, 8)
SHORT, LONG = (32, 160), sized((3000, 16), (300, 4))
"""Prompt and answer of the requests that change."""
LAB_SHORT, LAB_LONG = sized(((32, 16), (3800, 2)), ((32, 4), (380, 2)))
LAB = """
source = "a"
[[device]]
name = "a"
memory_bytes = 32e9
bandwidth_bytes_per_s = 2e11
flops = 1e13
[[device]]
name = "b"
memory_bytes = 32e9
bandwidth_bytes_per_s = 2e11
flops = 1e13
[[link]]
bandwidth_bps = 1e9
latency_s = 0.002
[model]
dtype = "float16"
[lab]
model = "llama2-7b"
"""
"""Two nodes so slow that the lab's own work with a frame is little compared with a step."""
MAX_CONTEXT = 4096
LIMIT = 0.15
_DEPLOY_S = 180.0


@dataclass(frozen=True, slots=True)
class Served:
    """The client's times of one request, in seconds; `per_token_s` is the median gap."""

    ttft_s: float
    per_token_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A deployment's promise and the measured medians."""

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
    """A site, one deployment on it at a time, and the requests sent to that.

    A deployment is planned for the requests that earlier ones of its name served.
    """

    def __init__(self, client: Client, name: str, rounds: int, dtype: str = "bfloat16") -> None:
        self._client = client
        self._name = name
        self._rounds = rounds
        self._dtype = dtype
        self._sent = 0

    async def profile(self, quick: bool) -> None:
        """As an operator has nodes measured: those that were disturbed are measured again. Raises a
        node's error."""
        await profiled(self._client, MODEL, quick=quick, dtype=DType.parse(self._dtype))

    async def row(self, case: str, prompt_tokens: int, **spec: Any) -> Row:
        """Deploy, measure, delete."""
        lengths = {"prompt_tokens": prompt_tokens, "new_tokens": NEW_TOKENS}
        deployment = await self.deploy(**lengths, **spec)
        measured = await self.requests(prompt_tokens, NEW_TOKENS, self._rounds)
        await self.delete()
        return tell(
            Row(case, placed(deployment), promised(deployment.placement.predicted), measured)
        )

    async def deploy(self, **spec: Any) -> Deployment:
        values = {
            "name": self._name,
            "model": MODEL,
            "source": NODES[0],
            "dtype": self._dtype,
            "concurrency": 1,
        }
        values |= {"max_context": MAX_CONTEXT, "objective": "request", "speculation": "off", **spec}
        deployment = await self._client.deploy(parse_spec(values), timeout_s=_DEPLOY_S)
        await self.request(16, 4)  # Weights that were not read for a while are slow at first.
        return deployment

    async def delete(self) -> None:
        await self._client.delete_deployment(self._name, timeout_s=_DEPLOY_S)

    async def outlook(self) -> Deployment:
        return await self._client.deployment(self._name, outlook=True)

    async def requests(self, prompt_tokens: int, new_tokens: int, count: int) -> Served:
        """The medians of `count` requests, one after the other."""
        served = [await self.request(prompt_tokens, new_tokens) for _ in range(count)]
        columns = zip(*(asdict(item).values() for item in served), strict=True)
        return Served(*(statistics.median(column) for column in columns))

    async def request(self, prompt_tokens: int, new_tokens: int) -> Served:
        self._sent += 1
        # the stand-in knows few
        prompt = [token % VOCABULARY for token in prompt_of(self._sent, prompt_tokens)]
        stream = await answered(
            self._client, self._name, prompt, max_new_tokens=new_tokens, ignore_eos=True
        )
        return Served(
            stream.waits_s[0], statistics.median(stream.gaps_s), stream.times[-1] - stream.times[0]
        )


def promised(prediction: Prediction | None) -> Served:
    assert prediction is not None, "both nodes were measured"
    return Served(
        prediction.time_to_first_token_s, prediction.time_per_token_s, prediction.request_s
    )


def placed(deployment: Deployment) -> str:
    return ",".join(f"{stage.node_name}={stage.layers}" for stage in deployment.placement.stages)


def tell(row: Row) -> Row:
    figures = ", ".join(
        f"{name} {1000 * value:.1f} ms ({100 * row.off[name]:+.1f} %)"
        for name, value in asdict(row.measured).items()
    )
    print(f"{row.case} {row.placement}: {figures}", file=sys.stderr, flush=True)
    return row


async def changing(
    site: Promises, short: tuple[int, int], long: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """Short prompts, then long ones, on one deployment that was given no lengths; then it is
    deployed again.

    The deployment is planned for the requests that its predecessor served, as a deployment is that
    has run for a while. The outlook's promise is for the mean lengths it saw, so requests of these
    lengths are measured, on both placements in turns.
    """
    await site.deploy()
    await site.requests(*short, rounds)
    await site.delete()
    first = await site.deploy()
    quiet = await site.outlook()
    await site.requests(*long, 3 * rounds)
    asked = await site.outlook()
    outlook = asked.outlook
    assert outlook is not None and outlook.expected is not None
    seen = (int(asked.traffic.prompts.mean), int(asked.traffic.answers.mean))
    await site.delete()
    again = await site.deploy()
    await site.delete()
    both: dict[str, list[float]] = {placed(first): [], placed(again): []}
    for _, layers in itertools.product(range(rounds), both):
        await site.deploy(layers=layers)
        both[layers].append((await site.request(*seen)).request_s)
        await site.delete()
    was_s, is_s = (statistics.median(both[placed(item)]) for item in (first, again))
    result = {
        "lengths": {"short": short, "long": long, "seen": seen},
        "placements": [placed(first), placed(again)],
        "said_while_short": quiet.outlook is not None and quiet.outlook.better is not None,
        "said_once_long": outlook.better is not None,
        "promised_s": [
            outlook.expected.request_s,
            outlook.better.request_s if outlook.better is not None else None,
        ],
        "measured_s": [was_s, is_s],
        "promised_gain": outlook.gain,
        "gain": 1 - is_s / was_s,
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


async def run_lab(rounds: int) -> dict[str, Any]:
    """The requests that change, on two emulated nodes: unlike two cores of one machine, they do not
    slow each other."""
    async with lab_site(LAB, MODEL) as (_, client):
        site = Promises(client, "emulated", rounds, "float32")
        await site.profile(quick=True)
        return await changing(site, LAB_SHORT, LAB_LONG, rounds)


async def run(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    async with PinnedSite(scratch) as two_nodes:
        client = two_nodes.client
        site = Promises(client, "promised", arguments.rounds)
        await site.profile(arguments.quick)
        halves = f"{NODES[0]}=0:{LAYERS // 2},{NODES[1]}={LAYERS // 2}:{LAYERS}"
        rows = []
        if not arguments.changing:
            rows.append(await site.row(f"halves {PROMPTS[1]}", PROMPTS[1], layers=halves))
            for objective, prompt_tokens in itertools.product(("request", "ttft"), PROMPTS):
                rows.append(
                    await site.row(
                        f"{objective} {prompt_tokens}", prompt_tokens, objective=objective
                    )
                )
        change = await changing(
            Promises(client, "changing", arguments.rounds), SHORT, LONG, arguments.rounds
        )
    return {
        "benchmark": "promises",
        "rows": [asdict(row) | {"off": row.off} for row in rows],
        "changing": change,
        "load_1_minute": os.getloadavg()[0],
    }


def kept(report: dict[str, Any]) -> bool:
    """Whether every promise of an objective's own figure is within `LIMIT`, and so is the gain on
    emulated nodes."""
    own = {"request": "request_s", "ttft": "ttft_s", "halves": "request_s"}
    off = [row["off"][own[row["case"].split()[0]]] for row in report["rows"]]
    change = report["changing_lab"]
    off.append(change["gain"] / (change["promised_gain"] or 1.0) - 1)
    return change["said_once_long"] and all(abs(value) <= LIMIT for value in off)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="measure the nodes quickly")
    parser.add_argument("--changing", action="store_true", help="only the requests that change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-promises-") as scratch:
        report = asyncio.run(run(arguments, Path(scratch)))
    report["changing_lab"] = asyncio.run(run_lab(arguments.rounds))
    report["within_limit"] = kept(report)
    print(json.dumps(report, indent=1))
    write_rows(arguments.output, report)
    return 0 if report["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
