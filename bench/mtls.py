"""What mutual TLS costs: `python -m bench.mtls`.

Two sites of three boxes run on this machine, one over mutual TLS and one in plaintext, with the demo model split over
the boxes. They generate in turns, `--rounds` times each, first in one order and then in the other: one stream, then
`--streams` at a time.
Prints the tokens a second of each, and the median ratio of the pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from edgeshard import Client
from edgeshard.cli.local import LocalCluster
from edgeshard.domain.deployment import parse_spec
from tests.chaos.site import DEMO_MODEL

NODES = ("a", "b", "c")
KINDS = {"plaintext": False, "mTLS": True}
TOKENS = 200


async def main(rounds: int, streams: int) -> int:
    with tempfile.TemporaryDirectory(prefix="mtls-") as scratch:
        sites = {
            kind: LocalCluster(_made(Path(scratch) / kind), NODES, secure=secure) for kind, secure in KINDS.items()
        }
        clients: dict[str, Client] = {}
        try:
            for kind, site in sites.items():
                await site.start()
                clients[kind] = site.client()
                await _deployed(clients[kind], streams)
            for count in (1, streams):
                await _compare(clients, count, rounds)
        finally:
            for client in clients.values():
                await client.close()
            for site in sites.values():
                await site.stop()
    return 0


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


async def _deployed(client: Client, streams: int) -> None:
    await client.add_model(DEMO_MODEL, "tales")
    spec = {"name": "tales", "model": "tales", "source": "a", "layers": "a=0:4,b=4:8,c=8:12", "max_context": 512}
    await client.deploy(parse_spec({**spec, "dtype": "float32", "concurrency": streams}), timeout_s=120.0)


async def _compare(clients: dict[str, Client], streams: int, rounds: int) -> None:
    for client in clients.values():
        await _rate(client, streams)  # warm
    rates: dict[str, list[float]] = {kind: [] for kind in clients}
    for turn in range(rounds):
        for kind in sorted(clients, reverse=bool(turn % 2)):
            rates[kind].append(await _rate(clients[kind], streams))
    ratios = [secure / plain for secure, plain in zip(rates["mTLS"], rates["plaintext"], strict=True)]
    said = ", ".join(f"{kind} {statistics.median(found):.1f} tokens/s" for kind, found in rates.items())
    low, high = min(ratios), max(ratios)
    print(f"{streams} stream{'s' * (streams > 1)}: {said}; mTLS / plaintext {statistics.median(ratios):.3f}", end=" ")
    print(f"(median of {rounds} pairs, {low:.3f} to {high:.3f})", flush=True)


async def _rate(client: Client, streams: int) -> float:
    """Tokens a second of so many answers at once."""
    began = time.monotonic()
    prompts = [f"Once upon a time there were {number} kings" for number in range(streams)]
    answers = [client.complete("tales", prompt, max_new_tokens=TOKENS, ignore_eos=True) for prompt in prompts]
    done = await asyncio.gather(*answers)
    return sum(len(answer.token_ids) for answer in done) / (time.monotonic() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=16)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.rounds, arguments.streams)))
