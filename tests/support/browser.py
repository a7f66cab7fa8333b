"""Chromium as tests drive it on the dashboard of a site, and what must not happen in any page of
it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    async_playwright,
    expect,
)

from edgeshard import Client

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: Debian's package of that name"
)
DESKTOP, PHONE = (1280, 800), (390, 844)
PATIENCE_MS = 30_000
STREAM = "/dashboard/stream"
expect.set_options(timeout=PATIENCE_MS)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """In its sandbox, but as root, who has none."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, chromium_sandbox=os.geteuid() != 0
        )
        try:
            yield browser
        finally:
            await browser.close()


class Visitor:
    """A browser of its own, with its own cookies. `problems` are errors of its console, which
    breaches of the page's policy are too, and requests to other hosts; `streams` counts those open
    now."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context, self.url = context, url
        self.problems: list[str] = []
        self._streams: dict[Request, Page] = {}
        context.set_default_timeout(PATIENCE_MS)
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self.problems.append(str(error.error)))
        context.on("request", self._on_request)
        context.on("requestfailed", self._on_end)
        context.on("requestfinished", self._on_end)

    @property
    def streams(self) -> int:
        return sum(not page.is_closed() for page in self._streams.values())

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _on_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and url.netloc != urlsplit(self.url).netloc:
            self.problems.append(f"asked another host: {request.url}")
        if url.path == STREAM:
            self._streams[request] = request.frame.page

    def _on_end(self, request: Request) -> None:
        self._streams.pop(request, None)

    async def enter(self, client: Client) -> Page:
        """A page that opened the link which `edgectl dashboard` prints."""
        page = await self.context.new_page()
        await page.goto((await client.dashboard_link()).url)
        await live(page)
        return page

    async def another(self, screen: str) -> Page:
        """One more page of the same browser."""
        page = await self.context.new_page()
        await page.goto(f"{self.url}/#/{screen}")
        return page


@asynccontextmanager
async def visiting(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, **options: Any
) -> AsyncIterator[Visitor]:
    context = await browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    try:
        yield Visitor(context, url)
    finally:
        await context.close()


async def live(page: Page) -> None:
    await page.locator(".state.live").wait_for()


async def screens(page: Page) -> list[str]:
    """Those that the navigation leads to."""
    links = await page.locator("nav a").all()
    return [str(await link.get_attribute("href")).removeprefix("#/") for link in links]


async def go(page: Page, screen: str) -> None:
    """By the navigation, as a person does."""
    await page.locator(f'nav a[href="#/{screen}"]').click()
    await page.locator(f'nav a[href="#/{screen}"][aria-current=page]').wait_for()
    await page.locator("main section h2").first.wait_for()


async def show(page: Page, screen: str) -> None:
    """By its address, as a bookmark does."""
    await page.evaluate("screen => { location.hash = `#/${screen}`; }", screen)
    await page.locator(f"nav a[href='#/{screen.partition('/')[0]}'][aria-current=page]").wait_for()
    await page.locator("main section h2").first.wait_for()


async def hide(page: Page, hidden: bool) -> None:
    """Send the event of another tab coming to the front: browsers without a window show all their
    pages."""
    await page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => "
        "hidden });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )
