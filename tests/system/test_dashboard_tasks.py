"""A person's tasks on the dashboard in Chromium, at two widths and in two colours. Each step leaves
a picture in the test's folder, and no error in the console. A recovery is watched in
`test_dashboard_recovery.py`."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from edgeshard.domain.deployments.deployment import parse_spec
from tests.support.browser import DESKTOP, PHONE, chromium, go, needs_chromium, visiting
from tests.support.chat_models import DEMO_MODEL
from tests.support.http import Http
from tests.support.membership import SecureSite
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]

GATEWAY = ("--http-listen", "127.0.0.1:0")
SPEC = {
    "name": "tales",
    "model": "fairy-tales",
    "dtype": "float32",
    "concurrency": 2,
    "layers": "a=0:6,b=6:12",
}
CHAT = {
    "model": "tales",
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 3,
    "temperature": 0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Nodes a, b and c; the deployment tales uses a and b. The coordinator may add models of a
    folder."""
    directory = tmp_path_factory.mktemp("site")
    folder = directory / "folder"
    shutil.copytree(DEMO_MODEL, folder / "new-tales")
    arguments = (*GATEWAY, "--model-folder", str(folder))
    async with Site(
        directory, models={"fairy-tales": DEMO_MODEL}, coordinator_arguments=arguments
    ) as site:
        await site.client.deploy(parse_spec(SPEC))
        yield site


@dataclass
class Task:
    """A person's way over pages; `pictures` is the folder of its pictures."""

    page: Page
    pictures: Path

    async def picture(self, name: str) -> None:
        await self.page.screenshot(path=self.pictures / f"{name}.png", full_page=True)
        too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not await self.page.evaluate(too_wide), f"{name} is wider than the window"

    async def click(self, button: str) -> None:
        await self.page.get_by_role("button", name=button, exact=True).click()

    async def open(self, screen: str, heading: str) -> None:
        await self.page.goto(f"{self.page.url.partition('#')[0]}#/{screen}")
        await expect(self.page.locator("h2").first).to_contain_text(heading)


async def add_and_deploy_a_model(task: Task, name: str) -> None:
    await go(task.page, "models")
    await expect(task.page.get_by_label("Found in the folders")).to_contain_text("new-tales")
    await task.page.get_by_label("Name in the store").fill(name)
    await task.click("Add")
    link = task.page.get_by_role("region", name="Models", exact=True).get_by_role("link", name=name)
    await expect(link).to_be_visible()
    await task.picture("models")
    await link.click()
    await expect(task.page.get_by_role("button", name=f"Deploy {name}")).to_be_disabled()
    await task.page.get_by_label("Concurrent requests").fill("2")
    await task.click("Show the plan")
    await expect(task.page.get_by_role("region", name="The plan")).to_be_visible()
    await task.click(f"Deploy {name}")
    await task.open(f"deployments/{name}", name)
    await expect(task.page.locator("h2 .phase").first).to_have_text("ready")
    await task.open(f"models/{name}", name)
    await expect(task.page.locator("pre.secret").first).to_contain_text(f'"model":"{name}"')
    await task.picture("model")


async def find_why_a_node_is_unused(task: Task) -> None:
    await go(task.page, "nodes")
    await task.picture("nodes")
    await task.page.get_by_role("link", name="c", exact=True).click()
    await expect(task.page.locator("main")).to_contain_text("No deployment has layers here.")
    await task.click("Find why it is unused by tales")
    causes = task.page.get_by_role("region", name="Why it is unused")
    await expect(causes).to_contain_text("An operator placed tales by hand: a (0:6), b (6:12).")
    await expect(causes).to_contain_text("edgectl describe deployment tales")
    await task.picture("unused")


async def label_a_node(task: Task) -> None:
    await task.open("nodes/c", "c")
    await task.page.get_by_label("Label", exact=True).fill("zone")
    value = task.page.get_by_label("Value", exact=True)
    await value.fill("hall one")
    await task.click("Set the label")
    await expect(task.page.get_by_role("alert")).to_contain_text("use 1-63 letters")
    await value.fill("hall1")
    await task.click("Set the label")
    labels = task.page.get_by_role("region", name="Labels")
    await expect(labels).to_contain_text("hall1")
    await task.click("Remove zone")
    await expect(labels).not_to_be_visible()


async def create_and_use_a_key(task: Task, gateway: str) -> None:
    await go(task.page, "keys")
    await expect(task.page.get_by_role("button", name="Create the key")).to_be_disabled()
    await task.page.get_by_label("Name", exact=False).first.fill("shop")
    await task.page.get_by_label("tales", exact=True).check()
    await task.page.get_by_label("Concurrent requests").fill("2")
    line = task.page.locator("p.line code", has_text="edgectl key create")
    await expect(line).to_have_text("edgectl key create shop --model tales --requests 2")
    await task.click("Create the key")
    await expect(task.page.locator("main")).to_contain_text("The new key shop")
    texts = await task.page.locator("pre.secret").all_inner_texts()
    key = texts[0]
    assert all(key in text and gateway in text for text in texts[1:]) and len(texts) == 4
    assert (await Http(gateway, key).post("/v1/chat/completions", CHAT)).status == 200
    row = task.page.get_by_role("region", name="Keys").get_by_role("row", name="shop")
    await expect(row).to_contain_text("2 concurrent requests")
    await expect(row.get_by_role("cell").nth(4)).to_have_text("1")
    await task.picture("key")
    await task.page.reload()
    await expect(row).to_be_visible()
    assert key not in await task.page.content()
    await task.click("Revoke shop")
    await expect(task.page.get_by_role("button", name="Keep")).to_be_focused()
    await task.click("Keep")
    await task.click("Revoke shop")
    await task.picture("revoke")
    await task.click("Revoke shop")
    await expect(row).not_to_be_visible()
    assert (await Http(gateway, key).get("/v1/models")).status == 401


async def remove_a_node(task: Task) -> None:
    await task.open("nodes/c", "c")
    remove = task.page.get_by_role("button", name="Remove c")
    await expect(remove).to_be_disabled()
    await expect(task.page.locator("main")).to_contain_text("the removal costs nothing")
    await task.page.get_by_label("Type its name").fill("c")
    await task.picture("remove")
    await remove.click()
    await expect(task.page.locator("main")).to_contain_text("The site has no node c.")
    await task.picture("removed")


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_the_tasks_of_an_operator(
    site: Site, browser: Browser, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    gateway = site.cluster.coordinator.gateway
    name = f"tales-{size[0]}-{scheme}"
    async with visiting(browser, gateway, size, color_scheme=scheme) as visitor:
        task = Task(await visitor.enter(site.client), tmp_path)
        await find_why_a_node_is_unused(task)
        await label_a_node(task)
        await create_and_use_a_key(task, gateway)
        await remove_a_node(task)
        await add_and_deploy_a_model(task, name)
        await task.open("about", "About")
        await task.click("Show their licences")
        await expect(task.page.locator("main pre")).to_contain_text("preact@")
        await task.picture("about")
        (refusal,) = visitor.problems
        assert "status of 400" in refusal, (
            "of the label that was refused, which Chromium always writes"
        )
    await site.client.delete_deployment(name)
    await site.cluster.agents["c"].stop()
    await site.cluster.start_agent("c")


@pytest.mark.long
async def test_the_first_steps_of_a_site_with_certificates(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    async with (
        SecureSite(tmp_path / "site", *GATEWAY) as mill,
        mill.client_of(name="anna") as client,
        visiting(browser, mill.coordinator.gateway, PHONE) as visitor,
    ):
        task = Task(await visitor.enter(client), tmp_path)
        steps = task.page.locator(".steps li")
        await expect(steps).to_have_count(3)
        await expect(task.page.locator(".steps li.done")).to_have_count(0)
        await task.picture("first")
        await client.create_key("shop")
        await client.add_model(DEMO_MODEL, "fairy-tales")
        await expect(task.page.locator(".steps li.done")).to_have_count(2)
        await task.page.get_by_role("link", name="Add a node").click()
        await task.page.get_by_label("Its name").fill("pi")
        await task.click("Create the command")
        await expect(task.page.locator("pre.secret")).to_contain_text("edgectl join edgeshard2-")
        tokens = task.page.get_by_role("region", name="Valid join tokens")
        await expect(tokens).to_contain_text("agent pi")
        await expect(tokens).to_contain_text("by operator/anna")
        await task.picture("token")
        await task.click("Revoke")
        await tokens.get_by_role("button", name="Revoke", exact=True).click()
        await expect(tokens).not_to_be_visible()
        assert not visitor.problems
