"""Sites that several benchmarks start, calls to them that several make, and how rows are written."""

from __future__ import annotations

import json
import os
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgeshard.cli.commands.site.demo import model_directory
from edgeshard.client import Client
from edgeshard.domain.requests.generation import Token
from edgeshard.local.cluster import LocalCluster
from edgeshard.local.lab_site import lab_cluster, make_stand_in
from edgeshard.planning.simulation.lab import Lab, parse_lab


@asynccontextmanager
async def demo_site(
    nodes: Sequence[str], model: str = "demo", **options: Any
) -> AsyncIterator[tuple[LocalCluster, Client]]:
    """Real processes on loopback whose coordinator has the demo model by that name; `options` are of LocalCluster."""
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-") as scratch, model_directory(None) as directory:
        async with LocalCluster(Path(scratch), nodes, **options) as cluster, cluster.client() as client:
            await client.add_model(directory, model)
            yield cluster, client


@asynccontextmanager
async def lab_site(text: str, model: str = "stand-in") -> AsyncIterator[tuple[Lab, Client]]:
    """The processes that emulate the nodes of a lab file, whose coordinator has the stand-in model by that name."""
    lab = parse_lab(tomllib.loads(text), lambda name: {})
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-lab-") as scratch:
        directory = Path(scratch)
        lab_file = directory / "lab.toml"
        lab_file.write_text(text, encoding="utf-8")
        make_stand_in(lab, directory / "stand-in")
        async with lab_cluster(lab, lab_file, directory) as cluster, cluster.client() as client:
            await client.add_model(directory / "stand-in", model)
            yield lab, client


@asynccontextmanager
async def pinned(cluster: LocalCluster, first_core: int = 0) -> AsyncIterator[LocalCluster]:
    """The cluster, with each agent on a core of its own from its start, as an operator pins them:
    an agent reads its allowed cores when it starts. The first one is on `first_core`, the others on
    the following cores."""
    everywhere = os.sched_getaffinity(0)
    try:
        await cluster.start_coordinator()
        try:
            for core, name in enumerate(cluster.nodes, first_core):
                os.sched_setaffinity(0, {core})
                await cluster.start_agent(name)
        finally:
            os.sched_setaffinity(0, everywhere)
        yield cluster
    finally:
        await cluster.stop()


async def arrivals(
    client: Client, deployment: str, prompt: str | Sequence[int], new_tokens: int
) -> list[tuple[float, Token]]:
    """Each token of a request that runs to its last token, and its arrival by `time.perf_counter`."""
    events = client.generate(deployment, prompt, max_new_tokens=new_tokens, ignore_eos=True)
    async with aclosing(events) as stream:
        return [(time.perf_counter(), event) async for event in stream if isinstance(event, Token)]


def gaps_s(came: Sequence[tuple[float, Token]]) -> list[float]:
    """Seconds between one token and the next."""
    return [later - earlier for (earlier, _), (later, _) in pairwise(came)]


async def profiled(client: Client, model: str, **options: Any) -> None:
    """Have all nodes measure themselves with the model. Raises the error of a node that could not."""
    async with aclosing(client.profile(model, (), **options)) as telling:
        async for progress in telling:
            if progress.failure is not None:
                raise progress.failure


def write_rows(path: Path | None, rows: object) -> None:
    """As JSON to a file, if one is named."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
