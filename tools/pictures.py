"""The pictures of README.md, of a real run: three boxes on this machine with the demo model, in Chromium.

    python -m tools.pictures      `make pictures`

docs/pictures/site.png is the dashboard while three answers stream; docs/pictures/kill.webp what a browser shows of a
box that is killed in the middle of an answer: the playground beside the map, in the time that it took.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sys
import tempfile
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

from PIL import Image
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import EdgeShardError
from edgeshard.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
MODEL = ROOT / "edgeshard" / "demo_model"
BOXES = ("office", "attic", "garage")
LAYERS = "office=0:4,attic=4:9,garage=9:12"
VICTIM = "attic"
PROMPT = "Once upon a time there was a king who had three sons"
Frame = tuple[float, Image.Image]
"""When it was taken, in seconds, and both pages side by side."""
MOST_BYTES = 1_000_000
SIZE = (1280, 760)
HALF = (560, 720)
FRAME_S = 0.1
ENDING_S = 2.5
"""How long the recording goes on once the answer is there."""


async def main(pictures: Path = PICTURES) -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("pictures: chromium is not installed: Debian's package of that name", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        gateway = ("--http-listen", "127.0.0.1:0")
        cluster = LocalCluster(Path(directory), BOXES, coordinator_arguments=gateway, secure=True)
        async with cluster, cluster.client() as client, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, chromium_sandbox=os.geteuid() != 0)
            await deploy(client)
            await picture_of_site(browser, client, pictures / "site.png")
            write(await recording_of_kill(browser, client, cluster), pictures / "kill.webp")
            await browser.close()
    return checked(pictures)


def checked(pictures: Path) -> int:
    """Print the sizes of all pictures; 1 where one is too large."""
    sizes = {path.name: path.stat().st_size for path in sorted(pictures.iterdir())}
    for name, size in sizes.items():
        print(f"{name}: {size / 1000:.0f} kB" + (f", over {MOST_BYTES / 1000:.0f}" if size > MOST_BYTES else ""))
    return int(max(sizes.values()) > MOST_BYTES)


async def deploy(client: Client) -> None:
    """The demo model, and links that were measured, so that a pause can be predicted."""
    await client.add_model(MODEL, "fairy-tales")
    spec = {"name": "tales", "model": "fairy-tales", "source": BOXES[0], "dtype": "float32", "layers": LAYERS}
    await client.deploy(parse_spec(spec))
    while True:
        found = (await client.deployment("tales", outlook=True)).outlook
        if found is not None and found.losses and all(loss.pause for loss in found.losses):
            return
        await asyncio.sleep(0.5)


async def entered(context: BrowserContext, client: Client) -> Page:
    page = await context.new_page()
    await page.goto((await client.dashboard_link()).url)
    await page.locator(".state.live").wait_for()
    return page


async def answers(client: Client) -> None:
    """One after another, until it is cancelled."""
    while True:
        async with aclosing(client.generate("tales", PROMPT, max_new_tokens=300, ignore_eos=True)) as events:
            async for _ in events:
                pass


async def picture_of_site(browser: Browser, client: Client, path: Path) -> None:
    context = await browser.new_context(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
    page = await entered(context, client)
    traffic = [asyncio.create_task(answers(client)) for _ in range(3)]
    await page.locator(".hop.moving").first.wait_for()
    await asyncio.sleep(3.0)  # rates are over two seconds
    await page.screenshot(path=path)
    for task in traffic:
        task.cancel()
    await asyncio.gather(*traffic, return_exceptions=True)
    await context.close()


async def recording_of_kill(browser: Browser, client: Client, cluster: LocalCluster) -> list[Frame]:
    context = await browser.new_context(viewport={"width": HALF[0], "height": HALF[1]}, color_scheme="light")
    site = await entered(context, client)
    await site.goto(site.url.partition("#")[0] + "#/deployments/tales")
    await site.get_by_role("region", name="If a box is lost").wait_for()  # it knows what it would cost
    await site.locator('nav a[href="#/site"]').click()
    talk = await context.new_page()
    await talk.goto(site.url.partition("#")[0] + "#/playground")
    await talk.get_by_label("New tokens").fill("320")
    await talk.get_by_label("Message").fill(PROMPT)
    frames: list[Frame] = []
    await frame(talk, site, frames)
    await talk.get_by_role("button", name="Send").click()
    ended, killed = 0.0, False
    while not ended or time.monotonic() - ended < ENDING_S:
        await frame(talk, site, frames)
        parts = await talk.locator(".turn.assistant span").count()
        if parts > 80 and not killed:
            await cluster.agents[VICTIM].kill()
            killed = True
        if killed and not ended and await talk.get_by_role("button", name="Stop").is_disabled():
            ended = time.monotonic()
    await context.close()
    return frames


async def frame(talk: Page, site: Page, frames: list[Frame]) -> None:
    """Both pages as they are now, the newest text of the answer in view."""
    began = time.monotonic()
    await talk.evaluate("document.querySelector('form').scrollIntoView({ block: 'end' })")
    taken = await asyncio.gather(talk.screenshot(), site.screenshot())
    shots = [Image.open(io.BytesIO(data)).convert("RGB") for data in taken]
    both = Image.new("RGB", (2 * HALF[0] + 2, HALF[1]), "#888888")
    both.paste(shots[0], (0, 0))
    both.paste(shots[1], (HALF[0] + 2, 0))
    frames.append((began, both))
    await asyncio.sleep(max(0.0, FRAME_S - (time.monotonic() - began)))


def write(frames: list[Frame], path: Path) -> None:
    """Each frame for as long as it took until the next."""
    times = [began for began, _ in frames]
    spans = [round(1000 * (after - before)) for before, after in pairwise(times)]
    first, *rest = [image for _, image in frames]
    first.save(
        path,
        save_all=True,
        append_images=rest,
        duration=[*spans, 2000],
        loop=0,
        quality=70,
        method=4,
        minimize_size=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except EdgeShardError as error:
        print(f"pictures: {error.message}", file=sys.stderr)
        sys.exit(1)
