"""Calls to a site that several benchmarks make, and how their rows are written."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgeshard.client import Client
from edgeshard.domain.requests.generation import Token


async def arrivals(
    client: Client, deployment: str, prompt: str | Sequence[int], new_tokens: int, **options: Any
) -> list[tuple[float, Token]]:
    """Each token of a request that goes on to its last, and when it came by `time.perf_counter`."""
    events = client.generate(deployment, prompt, max_new_tokens=new_tokens, ignore_eos=True, **options)
    async with aclosing(events) as stream:
        return [(time.perf_counter(), event) async for event in stream if isinstance(event, Token)]


def gaps_s(came: Sequence[tuple[float, Token]]) -> list[float]:
    """Seconds between one token and the next."""
    return [later - earlier for (earlier, _), (later, _) in pairwise(came)]


async def profiled(client: Client, model: str, nodes: Sequence[str] = (), **options: Any) -> None:
    """Have nodes measure themselves with the model, all where none is named. Raises the error of one that could not."""
    async with aclosing(client.profile(model, nodes, **options)) as telling:
        async for progress in telling:
            if progress.failure is not None:
                raise progress.failure


def write_rows(path: Path | None, rows: object) -> None:
    """As JSON to a file where one is named."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
