"""Sites that several benchmarks start, their load, and how rows are written."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeshard.cli.commands.site.demo import model_directory
from edgeshard.client import Client
from edgeshard.local.lab_site import lab_cluster, make_stand_in
from edgeshard.planning.simulation.lab import Lab, parse_lab
from tests.support.site import Site, processor_s


@asynccontextmanager
async def demo_site(
    nodes: Sequence[str], model: str = "demo", **options: Any
) -> AsyncIterator[Site]:
    """A site with the demo model by that name; `options` go to `Site`."""
    with (
        tempfile.TemporaryDirectory(prefix="edgeshard-bench-") as scratch,
        model_directory(None) as directory,
    ):
        async with Site(Path(scratch), nodes, models={model: directory}, **options) as site:
            yield site


@asynccontextmanager
async def lab_site(text: str, model: str = "stand-in") -> AsyncIterator[tuple[Lab, Client]]:
    """The processes that emulate the nodes of a lab file, whose coordinator has the stand-in model
    by that name."""
    lab = parse_lab(tomllib.loads(text), lambda name: {})
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-lab-") as scratch:
        directory = Path(scratch)
        lab_file = directory / "lab.toml"
        lab_file.write_text(text, encoding="utf-8")
        make_stand_in(lab, directory / "stand-in")
        async with lab_cluster(lab, lab_file, directory) as cluster, cluster.client() as client:
            await client.add_model(directory / "stand-in", model)
            yield lab, client


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of some answers at once, and seconds of processor time for each token."""

    tokens_per_s: float
    processor_s: float


async def rate_of(sites: Sequence[Site], deployment: str, streams: int, new_tokens: int) -> Rate:
    """The rate of `streams` answers at once, the sites in turn; processor time includes this
    process."""
    spent, began = processor_s(sites), time.monotonic()
    answers = [
        sites[number % len(sites)].client.complete(
            deployment,
            f"Once upon a time there were {number} kings",
            max_new_tokens=new_tokens,
            ignore_eos=True,
        )
        for number in range(streams)
    ]
    tokens = sum(len(answer.token_ids) for answer in await asyncio.gather(*answers))
    return Rate(tokens / (time.monotonic() - began), (processor_s(sites) - spent) / tokens)


async def profiled(client: Client, model: str, **options: Any) -> None:
    """Have all nodes measure themselves with the model. Raises the error of a node that could
    not."""
    async with aclosing(client.profile(model, (), **options)) as telling:
        async for progress in telling:
            if progress.failure is not None:
                raise progress.failure


def write_rows(path: Path | None, rows: object) -> None:
    """As JSON to a file, if one is named."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
