"""A browser's view while nodes and the coordinator are killed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.browser import Visitor, chromium, go, live, needs_chromium, visiting
from tests.support.chat_models import DEMO_MODEL
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]

RED_S = 3.0
SPEC = {
    "name": "tales",
    "model": "fairy-tales",
    "source": "a",
    "dtype": "float32",
    "concurrency": 4,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Three nodes, whose links were measured: then the pause after a loss can be predicted."""
    gateway = ("--http-listen", "127.0.0.1:0")
    directory, models = tmp_path_factory.mktemp("site"), {"fairy-tales": DEMO_MODEL}
    async with Site(directory, models=models, coordinator_arguments=gateway) as here:
        client = here.client
        await client.deploy(parse_spec({**SPEC, "layers": "a=0:4,b=4:9,c=9:12"}))

        async def measured() -> bool:
            found = (await client.deployment("tales", outlook=True)).outlook
            return (
                found is not None
                and len(found.losses) == 3
                and all(loss.pause for loss in found.losses)
            )

        await here.until(measured)
        yield here


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def visitor(site: Site) -> AsyncIterator[Visitor]:
    async with chromium() as browser, visiting(browser, site.cluster.coordinator.gateway) as one:
        yield one


async def foretold(page: Page) -> None:
    """Wait until the page knows the cost of a loss."""
    await page.goto(re.sub("#.*", "#/deployments/tales", page.url))
    await expect(
        page.get_by_role("region", name="If a node is lost").locator("tbody tr")
    ).to_have_count(3)
    await go(page, "site")


@pytest.mark.long
async def test_a_box_that_is_killed_is_red_at_once_and_its_layers_are_seen_to_move(
    site: Site, visitor: Visitor
) -> None:
    """While an answer streams in another tab, which continues with its next token."""
    watched = await visitor.enter(site.client)
    await foretold(watched)
    await expect(watched.locator(".node.connected")).to_have_count(3)
    page = await visitor.another("playground")
    answer = await asked(page)
    victim = (await site.client.deployment("tales")).placement.stages[1]
    began = time.monotonic()
    assert not answer.done()
    await site.cluster.agents[victim.node_name].kill()
    await watched.locator(f'.node.away[data-node="{victim.node_name}"]').wait_for()
    assert time.monotonic() - began <= RED_S
    await watched.locator(".move").first.wait_for()
    row = watched.get_by_role("region", name="Recoveries").locator("tbody tr").first
    await expect(row.locator("td").nth(1)).not_to_have_text("–")
    lost, stood_still, predicted, layers, taken, _ = await row.locator("td").all_inner_texts()
    placement = (await site.client.deployment("tales")).placement
    assert (lost, layers) == (victim.node_name, f"tales {victim.layers}")
    takers = {stage.node_name for stage in placement.stages} - {victim.node_name}
    assert {part.split()[0] for part in taken.split(", ")} <= takers
    for pause in (stood_still, predicted):
        assert re.fullmatch(r"[\d.]+ m?s", pause), pause
    text = await answer
    await page.get_by_role("button", name="Clear").click()
    assert text == await (await asked(page)), "no token was changed, lost or repeated"
    await site.cluster.start_agent(victim.node_name)
    await expect(watched.locator(".node.connected")).to_have_count(3)
    assert not visitor.problems
    await asyncio.gather(page.close(), watched.close())


async def asked(page: Page) -> asyncio.Task[str]:
    """The whole text of an answer that has begun."""
    await page.get_by_label("New tokens").fill("400")
    await page.get_by_label("Message").fill("Once upon a time")
    await page.get_by_role("button", name="Send").click()
    parts = page.locator(".turn.assistant span")
    await expect(parts.nth(5)).to_be_attached()
    await page.evaluate(
        "gone = false; new MutationObserver(() => { gone ||= "
        "!document.querySelector('.turn.assistant') })"
        ".observe(document.body, { subtree: true, childList: true })"
    )

    async def whole() -> str:
        await expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        assert not await page.evaluate("gone"), "the conversation left the screen meanwhile"
        return "".join(await parts.all_inner_texts())

    return asyncio.create_task(whole())


@pytest.mark.long
async def test_a_page_outlives_the_coordinator_and_says_how_to_come_in_again(
    site: Site, visitor: Visitor
) -> None:
    """The old snapshot stays while there is no coordinator; sessions are only in the coordinator's
    memory, and lost."""
    page = await visitor.enter(site.client)
    await go(page, "events")
    coordinator = site.cluster.coordinator
    coordinator.keep_address()
    await coordinator.kill()
    await expect(page.locator(".state.lost")).to_contain_text("the last state it sent")
    await expect(page.locator("main.stale tbody tr").first).to_be_visible()
    await site.cluster.start_coordinator()
    await expect(page.get_by_role("alert")).to_contain_text("the coordinator restarted")
    await expect(page.locator("pre")).to_have_text("edgectl dashboard")
    async with Client(site.cluster.address) as client:
        other = await visitor.enter(client)
        await live(page)  # which the link opened, too: it is the same browser
        await expect(page.locator('nav a[href="#/events"][aria-current=page]')).to_be_visible()
        await go(other, "site")
        await expect(other.locator(".node.connected")).to_have_count(3)
        deployments = await client.deployments()
        assert [deployment.spec.name for deployment in deployments] == ["tales"]
    allowed = re.compile("net::ERR_|401")
    assert [problem for problem in visitor.problems if not allowed.search(problem)] == []
    await asyncio.gather(page.close(), other.close())
