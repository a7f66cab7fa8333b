"""The pictures of README.md and docs/dashboard.md, of a real run: three nodes with the demo model,
in Chromium.

    python -m tools.pictures      `make pictures`

docs/pictures/site.png shows the dashboard while three answers stream. The files screen-NAME.webp
are its screens, and phone.webp has four of them at a phone's width. The file kill.webp records a
browser while a node is killed in the middle of an answer: the playground next to the map, at the
speed of the run.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
import sys
import tempfile
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import EdgeShardError
from edgeshard.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
MODEL = ROOT / "edgeshard" / "demo_model"
NODES = ("office", "attic", "garage")
LAYERS = "office=0:4,attic=4:9,garage=9:12"
VICTIM = "attic"
PROMPT = "Once upon a time there was a king who had three sons"
Frame = tuple[float, bytes]
"""When a page was drawn so, in seconds, and a JPEG."""
MOST_BYTES = 1_000_000
SIZE = (1280, 760)
HALF = (560, 720)
PHONE, PHONE_SCREENS = (390, 844), ("site", "now", "models", "nodes")
DETAILS = {"deployments": "deployments/tales", "nodes": f"nodes/{NODES[0]}"}
"""Screens that a screen of the navigation leads to, and that are shown below it."""
LEAST_HEIGHT = 300
DRAWN_S = 4.0
"""For charts to have some figures."""
FRAME_S = 0.1
ENDING_S = 2.5
"""How long the recording continues after the answer is complete."""


async def main(pictures: Path = PICTURES) -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("pictures: chromium is not installed: Debian's package of that name", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="site-") as directory:
        models = Path(directory) / "models"
        shutil.copytree(MODEL, models / "fairy-tales")
        gateway = ("--http-listen", "127.0.0.1:0", "--model-folder", str(models))
        cluster = LocalCluster(
            Path(directory) / "daemons", NODES, coordinator_arguments=gateway, secure=True
        )
        async with cluster, cluster.client() as client, async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=chromium, chromium_sandbox=os.geteuid() != 0
            )
            await deploy(client)
            await client.create_key("shop", ["tales"], tokens_per_minute=100_000, requests=8)
            await client.create_key("notebook")
            await pictures_of_screens(browser, client, pictures)
            write(await recording_of_kill(browser, client, cluster), pictures / "kill.webp")
            await browser.close()
    return checked(pictures)


def checked(pictures: Path) -> int:
    """Print the sizes of all pictures; return 1 if one is too large."""
    sizes = {path.name: path.stat().st_size for path in sorted(pictures.iterdir())}
    for name, size in sizes.items():
        print(
            f"{name}: {size / 1000:.0f} kB"
            + (f", over {MOST_BYTES / 1000:.0f}" if size > MOST_BYTES else "")
        )
    return int(max(sizes.values()) > MOST_BYTES)


async def deploy(client: Client) -> None:
    """The demo model, and links that were measured, so that a pause can be predicted."""
    await client.add_model(MODEL, "fairy-tales")
    spec = {
        "name": "tales",
        "model": "fairy-tales",
        "source": NODES[0],
        "dtype": "float32",
        "layers": LAYERS,
    }
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
        async with aclosing(
            client.generate("tales", PROMPT, max_new_tokens=300, ignore_eos=True)
        ) as events:
            async for _ in events:
                pass


async def pictures_of_screens(browser: Browser, client: Client, pictures: Path) -> None:
    """Take the pictures while answers stream: the one of README.md, each screen, and four of them
    on a phone."""
    context = await browser.new_context(
        viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light"
    )
    page = await entered(context, client)
    traffic = [asyncio.create_task(answers(client)) for _ in range(3)]
    await page.locator(".hop.moving").first.wait_for()
    await asyncio.sleep(DRAWN_S)  # rates are over two seconds
    await page.screenshot(path=pictures / "site.png")
    await page.set_viewport_size({"width": SIZE[0], "height": LEAST_HEIGHT})
    screens = [str(await link.get_attribute("href")) for link in await page.locator("nav a").all()]
    for screen in (address.removeprefix("#/") for address in screens):
        shots = [
            await shot_of(page, name) for name in (screen, DETAILS.get(screen)) if name is not None
        ]
        stacked(shots).save(pictures / f"screen-{screen}.webp", quality=80, method=6)
    await page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    await page.emulate_media(color_scheme="dark")
    phones = [await shot_of(page, screen) for screen in PHONE_SCREENS]
    row = [image.crop((0, 0, PHONE[0], 2 * PHONE[1])) for image in phones]
    beside(row).save(pictures / "phone.webp", quality=80, method=6)
    for task in traffic:
        task.cancel()
    await asyncio.gather(*traffic, return_exceptions=True)
    await context.close()


async def shot_of(page: Page, screen: str) -> Image.Image:
    """The whole of a screen; the playground in the middle of an answer."""
    await page.evaluate("screen => { location.hash = `#/${screen}`; }", screen)
    await page.locator(f"nav a[href='#/{screen.partition('/')[0]}'][aria-current=page]").wait_for()
    await page.locator("main section h2").first.wait_for()
    if screen == "playground":
        await page.get_by_label("Message").fill(PROMPT)
        await page.get_by_role("button", name="Send").click()
        await page.locator(".turn.assistant span").nth(40).wait_for(state="attached")
    else:
        await asyncio.sleep(DRAWN_S)
    return Image.open(io.BytesIO(await page.screenshot(full_page=True))).convert("RGB")


def stacked(images: list[Image.Image]) -> Image.Image:
    """The images below each other, with a line between them."""
    whole = Image.new(
        "RGB", (images[0].width, sum(image.height + 2 for image in images) - 2), "#888888"
    )
    y = 0
    for image in images:
        whole.paste(image, (0, y))
        y += image.height + 2
    return whole


def beside(images: list[Image.Image]) -> Image.Image:
    """The images next to each other, with a line between them."""
    size = (sum(image.width + 2 for image in images) - 2, max(image.height for image in images))
    whole = Image.new("RGB", size, "#888888")
    x = 0
    for image in images:
        whole.paste(image, (x, 0))
        x += image.width + 2
    return whole


async def recording_of_kill(
    browser: Browser, client: Client, cluster: LocalCluster
) -> list[tuple[float, Image.Image]]:
    context = await browser.new_context(
        viewport={"width": HALF[0], "height": HALF[1]}, color_scheme="light"
    )
    site = await entered(context, client)
    await site.goto(site.url.partition("#")[0] + "#/deployments/tales")
    await site.get_by_role(
        "region", name="If a node is lost"
    ).wait_for()  # it knows the cost by then
    await site.locator('nav a[href="#/site"]').click()
    talk = await context.new_page()
    await talk.goto(site.url.partition("#")[0] + "#/playground")
    await talk.get_by_label("New tokens").fill("320")
    await talk.get_by_label("Message").fill(PROMPT)
    shots = [await shots_of(page) for page in (talk, site)]
    await asyncio.sleep(1.0)
    await talk.get_by_role("button", name="Send").click()
    stop, killed = talk.get_by_role("button", name="Stop"), False
    while not killed or await stop.is_enabled():
        # The newest text of the answer stays in view.
        await talk.evaluate("document.querySelector('form').scrollIntoView({ block: 'end' })")
        if not killed and await talk.locator(".turn.assistant span").count() > 80:
            await cluster.agents[VICTIM].kill()
            killed = True
        await asyncio.sleep(FRAME_S / 2)
    await asyncio.sleep(ENDING_S)
    await context.close()
    return side_by_side(*shots)


async def shots_of(page: Page) -> list[Frame]:
    """The page as it is drawn from now on, whenever it changes, as the browser's debugger sends
    it."""
    found = list[Frame]()
    debugger = await page.context.new_cdp_session(page)

    async def shown(event: dict[str, Any]) -> None:
        found.append((time.monotonic(), base64.b64decode(event["data"])))
        await debugger.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

    debugger.on("Page.screencastFrame", lambda event: asyncio.ensure_future(shown(event)))
    await debugger.send("Page.startScreencast", {"format": "jpeg", "quality": 95})
    return found


def side_by_side(left: list[Frame], right: list[Frame]) -> list[tuple[float, Image.Image]]:
    """Both pages by time, each as it was last drawn."""
    began, ended = max(left[0][0], right[0][0]), max(left[-1][0], right[-1][0])
    found = list[tuple[float, Image.Image]]()
    for number in range(int((ended - began) / FRAME_S) + 1):
        at = began + number * FRAME_S
        both = Image.new("RGB", (2 * HALF[0] + 2, HALF[1]), "#888888")
        for x, frames in ((0, left), (HALF[0] + 2, right)):
            data = max((frame for frame in frames if frame[0] <= at), key=lambda frame: frame[0])[1]
            both.paste(Image.open(io.BytesIO(data)), (x, 0))
        found.append((at, both))
    return found


def write(frames: list[tuple[float, Image.Image]], path: Path) -> None:
    """Write the frames, each shown until the next one begins."""
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
