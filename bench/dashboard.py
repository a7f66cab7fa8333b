"""Measure the dashboard's costs: its coordinator's processor time, the size of its files, and the
time until it is visible.

Processor time is the coordinator's with five viewers minus the time without viewers, in turns, as a
fraction of one core. It is measured on a real site of three nodes that begins a short request twice
a second. It is also measured with a hundred nodes that have heartbeats and working stages but no
engine (`bench/many_boxes.py`). Viewers read the stream as pages do; of the three nodes they also
look at the step timeline, in turns of its own. The time until it is visible is measured in
Chromium, if playwright can be imported.

    python -m bench.dashboard [--rounds 5] [--seconds 10] [-o FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import importlib.util
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from edgeshard_coordinator.dashboard.app import ASSETS
from edgeshard_coordinator.dashboard.timeline import EVERY_S

from bench.engine_site import process_s
from bench.many_boxes import CALM_S, DEPLOYMENTS, STAGES, Node, Served, deploy, join
from bench.pages import with_trees
from bench.sites import demo_site, write_rows
from bench.sizes import sized
from edgeshard.cli.commands.site.demo import even_layers, model_directory
from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.rpc.environment import settle_grpc
from tests.support.http import Http

VIEWERS = 5
GATEWAY = ("--http-listen", "127.0.0.1:0")
ROOMS = ("coordinator", "edgeshard")
NODES = ("a", "b", "c")
TOKENS, REQUEST_EVERY_S = 24, 0.5
FIRST_S = sized(2.0, 0.2)
"""For viewers to have their first picture, before time is taken."""
PAINTS = sized(5, 1)
FAR = sized(100, 6)
LARGE = sized(20, 6)
LARGE_DEPLOYMENTS = sized(10, 2)
KEYS = sized(200, 2)
UPDATES = sized(20, 2)


class Viewer:
    """A browser that is logged in."""

    def __init__(self, http: Http, cookie: str, token: str) -> None:
        self._http = http
        self._headers = {"cookie": cookie, "origin": http.url, "x-edgeshard-token": token}
        self.received_bytes = 0

    @classmethod
    async def of(cls, client: Client, url: str) -> Viewer:
        http, secret = Http(url), (await client.dashboard_link()).url.partition("#open=")[2]
        answer = await http.post("/dashboard/session", {"secret": secret}, {"origin": url})
        return cls(http, answer.headers["set-cookie"].partition(";")[0], answer.json["token"])

    async def follow(self) -> None:
        async with self._http.opened("GET", "/dashboard/stream", None, self._headers) as stream:
            async for part in stream.parts():
                self.received_bytes += len(part)

    async def look(self) -> None:
        """At the timeline, as the page does."""
        while True:
            await self._http.post("/dashboard/do/timeline", {"name": "tales"}, self._headers)
            await asyncio.sleep(EVERY_S - 2)


Turn = Sequence[Callable[[], Awaitable[None]]]
"""The simultaneous actions of viewers."""


async def shares(
    pid: int, turns: dict[str, Turn], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """The process's share of a core in each turn, round after round."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            tasks = [asyncio.ensure_future(does()) for does in turn]
            await asyncio.sleep(FIRST_S)
            clock = asyncio.get_running_loop().time
            began_s, used_s = clock(), process_s(pid)
            await asyncio.sleep(seconds)
            found[name].append((process_s(pid) - used_s) / (clock() - began_s))
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return found


def row(
    nodes: int, found: dict[str, list[float]], seconds: float, viewers: Sequence[Viewer]
) -> dict[str, Any]:
    """The cost of each turn compared with the first, round by round."""
    plain, *others = found
    cost = {}
    for name in others:
        pairs = zip(found[name], found[plain], strict=True)
        cost[name] = [round(with_them - without, 5) for with_them, without in pairs]
    return {
        "benchmark": "dashboard",
        "nodes": nodes,
        "viewers": VIEWERS,
        "share_without": round(statistics.median(found[plain]), 5),
        "cost": {
            name: {"median": round(statistics.median(each), 5), "rounds": each}
            for name, each in cost.items()
        },
        "load_1_minute": os.getloadavg()[0],
        "viewer_bytes_per_s": round(
            statistics.mean(viewer.received_bytes for viewer in viewers)
            / ((seconds + FIRST_S) * len(found[plain]) * len(others))
        ),
    }


@asynccontextmanager
async def asked(client: Client) -> AsyncIterator[None]:
    """A short request begins now and again."""

    async def ask() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(
                    client.complete(
                        "tales", "Once upon a time", max_new_tokens=TOKENS, ignore_eos=True
                    )
                )
                await asyncio.sleep(REQUEST_EVERY_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def near(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Three real nodes, and a browser's view of them."""
    async with demo_site(NODES, coordinator_arguments=GATEWAY) as site:
        client = site.client
        layers = even_layers((await client.stored_model("demo")).layer_count, NODES)
        spec = {
            "name": "tales",
            "model": "demo",
            "source": "a",
            "dtype": "float32",
            "layers": layers,
        }
        await client.deploy(parse_spec(spec), timeout_s=60)
        url = site.gateway
        viewers = [await Viewer.of(client, url) for _ in range(VIEWERS)]
        assert site.coordinator.pid is not None
        async with asked(client):
            follow = [viewer.follow for viewer in viewers]
            turns: dict[str, Turn] = {
                "nobody": (),
                "viewers": follow,
                "viewers with the timeline": [*follow, *(viewer.look for viewer in viewers)],
            }
            found = await shares(site.coordinator.pid, turns, rounds, seconds)
        return [row(len(NODES), found, seconds, viewers), await seen(client)]


@asynccontextmanager
async def boxes(nodes: int, deployments: int) -> AsyncIterator[tuple[Served, Client]]:
    """A site of many nodes without engines."""
    async with AsyncExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeshard-bench-"))
        )
        model = stack.enter_context(model_directory(None))
        served = Served(directory, GATEWAY)
        await served.start()
        stack.push_async_callback(served.stop)
        started = [Node(number, served.address) for number in range(nodes)]
        for node in started:
            stack.push_async_callback(node.close)
        await join(started)
        client = await stack.enter_async_context(Client(served.address, plaintext=True))
        await deploy(client, model, deployments, nodes)
        await asyncio.sleep(CALM_S)
        yield served, client


async def cost_of(
    served: Served, client: Client, nodes: int, rounds: int, seconds: float
) -> dict[str, Any]:
    viewers = [await Viewer.of(client, served.gateway) for _ in range(VIEWERS)]
    assert served.pid is not None
    turns: dict[str, Turn] = {"nobody": (), "viewers": [viewer.follow for viewer in viewers]}
    return row(nodes, await shares(served.pid, turns, rounds, seconds), seconds, viewers)


async def far(rounds: int, seconds: float) -> dict[str, Any]:
    """Many nodes without engines."""
    async with boxes(FAR, min(DEPLOYMENTS, FAR // STAGES)) as (served, client):
        return await cost_of(served, client, FAR, rounds, seconds)


async def large(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Fewer nodes with as many deployments, and many keys; and how long a page takes for a change
    of all figures."""
    async with boxes(LARGE, LARGE_DEPLOYMENTS) as (served, client):
        for number in range(KEYS):
            await client.create_key(f"application-{number}")
        cost = await cost_of(served, client, LARGE, rounds, seconds)
        return [{**cost, "deployments": LARGE_DEPLOYMENTS, "keys": KEYS}, await updates(client)]


async def updates(client: Client) -> dict[str, Any]:
    """Seconds from the arrival of a change of all figures until each screen is drawn and laid out,
    in Chromium."""
    if lacks_browser():
        return {
            "benchmark": "dashboard update",
            "left_out": "there is no chromium, or no playwright",
        }
    from tests.support.browser import chromium, screens, show
    from tests.support.cuts import PICTURE, SCRIPTED_STREAM, busy_change, update_s

    found = {}
    async with chromium() as browser:
        context = await browser.new_context(viewport={"width": 1280, "height": 800})
        page = await context.new_page()
        await page.goto((await client.dashboard_link()).url)
        await page.wait_for_selector(".map .node")
        picture = await page.evaluate(PICTURE)
        await context.add_init_script(SCRIPTED_STREAM)
        await page.reload()
        await page.locator(".state").wait_for()
        await page.evaluate("picture => streaming.then(() => send('picture', picture))", picture)
        for screen in await screens(page):
            await show(page, screen)
            times = [
                await update_s(page, busy_change(picture, number))
                for number in range(1, UPDATES + 1)
            ]
            drawn = sorted(one for one in times if one is not None)
            if drawn:
                found[screen] = {
                    "median_ms": round(1000 * statistics.median(drawn), 1),
                    "max_ms": round(1000 * drawn[-1], 1),
                }
    return {"benchmark": "dashboard update", "nodes": LARGE, "updates": UPDATES, "screens": found}


def files() -> dict[str, Any]:
    """All that a page may load, each file compressed by gzip."""
    sizes = [
        len(gzip.compress(path.read_bytes()))
        for path in ASSETS.rglob("*")
        if path.suffix in (".js", ".css", ".html")
    ]
    return {
        "benchmark": "dashboard files",
        "files": len(sizes),
        "compressed_kB": round(sum(sizes) / 1000, 1),
    }


def lacks_browser() -> bool:
    return shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None


async def seen(client: Client) -> dict[str, Any]:
    """Seconds from opening a link, in a browser that has nothing yet, until something and until the
    site is seen."""
    chromium = shutil.which("chromium")
    if lacks_browser():
        return {
            "benchmark": "dashboard paint",
            "left_out": "there is no chromium, or no playwright",
        }
    from playwright.async_api import async_playwright

    first, site = [], []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(PAINTS):
            context = await browser.new_context(viewport={"width": 1280, "height": 800})
            page = await context.new_page()
            await page.goto((await client.dashboard_link()).url)
            await page.wait_for_selector(".map .node")
            site.append(await page.evaluate("performance.now() / 1000"))
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
            first.append(await page.evaluate(paint))
            await context.close()
        await browser.close()
    return {
        "benchmark": "dashboard paint",
        "first_paint_s": round(statistics.median(first), 3),
        "site_seen_s": round(statistics.median(site), 3),
        "rounds": [[round(one, 3) for one in pair] for pair in zip(first, site, strict=True)],
    }


async def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    return [
        files(),
        *await near(rounds, seconds),
        *await large(rounds, seconds),
        await far(rounds, seconds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    settle_grpc()  # for the coordinators' processes, which inherit it
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = with_trees(asyncio.run(measure(options.rounds, options.seconds)), ROOMS)
    for one in rows:
        print(json.dumps(one), file=sys.stderr)
    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
