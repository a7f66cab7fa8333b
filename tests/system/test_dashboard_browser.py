"""The dashboard in a real browser: each screen at two widths and in two colours, an operator's
actions, tabs."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import typer.main
from playwright.async_api import Browser, Page, expect
from safetensors.numpy import save_file

from edgeshard import Client
from edgeshard.architectures import expected_tensors
from edgeshard.cli.main import Lazy, app
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.rpc.channel import open_channel
from tests.coordinator.conftest import build_registration
from tests.support import forms
from tests.support.browser import (
    DESKTOP,
    PHONE,
    Visitor,
    chromium,
    go,
    hide,
    live,
    needs_chromium,
    screens,
    show,
    visiting,
)
from tests.support.chat_models import DEMO_MODEL
from tests.support.clients import CLIENTS, run
from tests.support.cuts import (
    OUTLOOK,
    PICTURE,
    SCRIPTED_STREAM,
    busy_change,
    crowded,
    cuts,
    cuts_at_all_sizes,
    update_s,
)
from tests.support.http import Http
from tests.support.running import EDGECTL
from tests.support.scripted_agent import FakeAgent
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]

AXE = CLIENTS / "node" / "node_modules" / "axe-core" / "axe.min.js"
SPEC = {
    "name": "tales",
    "model": "fairy-tales",
    "source": "a",
    "dtype": "float32",
    "concurrency": 4,
}
GATEWAY = ("--http-listen", "127.0.0.1:0")
READS = ("get nodes", "get deployments", "describe", "generate")
"""The beginnings of the lines that are run here; the others change something, or run until they are
stopped."""
EMPTY = {
    "site": "No node has joined yet",
    "deployments": "The store has no model",
    "playground": "No deployment is ready",
    "models": "The store has no model",
    "keys": "Keys",
    "nodes": "Create the command",
    "events": "Nothing has happened yet",
}
"""The texts on screens of an empty site."""
KEYS = 200
UPDATES = 5
UPDATE_S = 0.1
"""The limit of the quickest of `UPDATES`. The others also wait for processors that other tests
use."""
TABS = 8
"""More than the six connections that a browser allows to a host."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Three nodes with the demo model."""
    directory = tmp_path_factory.mktemp("site")
    async with Site(
        directory, models={"fairy-tales": DEMO_MODEL}, coordinator_arguments=GATEWAY
    ) as site:
        await site.client.deploy(parse_spec({**SPEC, "layers": "a=0:4,b=4:9,c=9:12"}))
        yield site


def write_large_model(directory: Path) -> None:
    """A Llama of 240 MB of weights that say nothing, each tensor another."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 14}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = [(tensor.name, tensor.shape) for tensor in expected_tensors(config).values()]
    tensors = {
        name: np.full(shape, index / 1000, np.float16)
        for index, (name, shape) in enumerate(shapes, 1)
    }
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_each_screen_opens_from_the_printed_link_and_every_reader_can_use_it(
    site: Site, browser: Browser, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    async with visiting(
        browser, site.cluster.coordinator.gateway, size, color_scheme=scheme
    ) as visitor:
        page = await visitor.enter(site.client)
        assert page.url == f"{visitor.url}/#/site", "the secret left the address"
        found = list[str]()
        for screen in (*await screens(page), "deployments/tales"):
            await (page.goto(f"{visitor.url}/#/{screen}") if "/" in screen else go(page, screen))
            await expect(page.locator("main section h2").first).to_be_visible()
            await page.screenshot(path=tmp_path / f"{screen.replace('/', '-')}.png", full_page=True)
            found += [f"{screen}: {fault}" for fault in await cuts(page)]
            found += [f"{screen}: {breach}" for breach in await breaches(page)]
        assert not found and not visitor.problems


async def all_screens(page: Page) -> list[str]:
    """The screens of the navigation, and the first one of each kind that these link to."""
    names, details = await screens(page), dict[str, str]()
    for name in names:
        await show(page, name)
        for link in await page.locator("main a[href^='#/']").all():
            screen = str(await link.get_attribute("href")).removeprefix("#/")
            if "/" in screen:
                details.setdefault(screen.partition("/")[0], screen)
    return [*names, *details.values()]


async def all_faults(page: Page) -> list[str]:
    """The faults of each screen at all widths and in both schemes."""
    found = list[str]()
    for screen in await all_screens(page):
        await show(page, screen)
        found += [f"{screen} at {fault}" for fault in await cuts_at_all_sizes(page)]
    return found


async def test_nothing_is_cut_on_any_screen(site: Site, browser: Browser) -> None:
    """On a site with many nodes, deployments and requests, whose names and figures are long. In the
    long form also on the plain site, whose screens are each measured at one size above."""
    url = site.cluster.coordinator.gateway
    async with visiting(browser, url) as visitor, visiting(browser, url) as other:
        page = await visitor.enter(site.client)
        assert not forms.LONG or await all_faults(page) == []
        picture = await page.evaluate(PICTURE)
        crowd = await crowded_page(other, crowded(picture, nodes=20, deployments=10), site.client)
        assert await all_faults(crowd) == []
        await show(crowd, "site")
        for number in (1, 2, 3, 8, 9) if forms.LONG else (2, 9):
            await crowd.evaluate(
                "picture => send('picture', picture)", crowded(picture, number, number)
            )
            await expect(crowd.locator(".map .node")).to_have_count(number)
            for width, height in (DESKTOP, PHONE):
                await crowd.set_viewport_size({"width": width, "height": height})
                assert await cuts(crowd) == [], f"{number} nodes at {width}"
        assert not visitor.problems and not other.problems


@pytest.mark.timing
@pytest.mark.long
async def test_an_update_of_a_large_site_is_drawn_at_once(site: Site, browser: Browser) -> None:
    """All figures of 20 nodes, 10 deployments and 50 requests change; the site has 200 keys."""
    url = site.cluster.coordinator.gateway
    async with visiting(browser, url) as visitor, visiting(browser, url) as other:
        picture = crowded(
            await (await visitor.enter(site.client)).evaluate(PICTURE), nodes=20, deployments=10
        )
        names = [f"application-{number}" for number in range(KEYS)]
        for name in names:
            await site.client.create_key(name)
        page = await crowded_page(other, picture, site.client)
        for screen in await all_screens(page):
            await show(page, screen)
            times = [
                await update_s(page, busy_change(picture, number))
                for number in range(1, UPDATES + 1)
            ]
            drawn = [seconds for seconds in times if seconds is not None]
            assert not drawn or min(drawn) <= UPDATE_S, f"{screen}: {times}"
            assert drawn or screen not in ("site", "now", "deployments"), (
                f"{screen} has no new figures"
            )
        for name in names:
            await site.client.revoke_key(name)


async def crowded_page(visitor: Visitor, picture: dict[str, Any], client: Client) -> Page:
    """A page with a stream of its own, which has sent `picture`."""
    await visitor.context.add_init_script(SCRIPTED_STREAM)
    await visitor.context.route(
        "**/dashboard/do/outlook*", lambda route: route.fulfill(json=OUTLOOK)
    )
    page = await visitor.context.new_page()
    await page.goto((await client.dashboard_link()).url)
    await page.locator(".state").wait_for()
    await page.evaluate("picture => streaming.then(() => send('picture', picture))", picture)
    await live(page)
    return page


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("<table style='width: 90rem'><tr><td>cut</td></tr></table>", "outside the window"),
        ("<div class='wide'><p style='width: 90rem'>cut</p></div>", "wider than its box"),
        (
            "<p style='overflow: hidden; white-space: nowrap; width: 4rem'>much too long</p>",
            "wider than its box",
        ),
        (
            "<p style='overflow: hidden; height: 1rem'>one<br>two<br>three</p>",
            "higher than its box",
        ),
        (
            "<svg width='60' height='20'><text y='15'>beyond the drawing</text></svg>",
            "outside its drawing",
        ),
        (
            "<svg width='300' height='20'><g><rect class='frame' width='9' height='9' "
            "/><text>x</text></g></svg>",
            "frame",
        ),
    ],
)
async def test_a_cut_is_found(browser: Browser, planted: str, fault: str) -> None:
    async with visiting(browser, "about:blank") as visitor:
        page = await visitor.context.new_page()
        await page.set_content(f"<style>.wide {{ overflow-x: auto }}</style><main>{planted}</main>")
        assert any(fault in one for one in await cuts(page))


async def breaches(page: Page) -> list[str]:
    """Rules of accessibility that axe-core finds broken on a page as it is, and their places; empty
    without axe-core.
    """
    if not AXE.exists():
        return []
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text(encoding="utf-8"))
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{broken['id']}: {broken['help']}: {[node['html'] for node in broken['nodes'][:3]]}"
        for broken in found["violations"]
    ]


async def test_the_pages_policy_holds_and_what_breaks_it_is_heard(
    site: Site, browser: Browser
) -> None:
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        injected = "<img src='https://other.example/x.png' onerror='window.ran = true'>"
        await page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", injected)
        await site.until(
            lambda: {"img-src", "script-src"} <= set(re.findall(r"\w+-src", str(visitor.problems)))
        )
        assert not await page.evaluate("'ran' in window")


async def test_what_a_node_says_is_text(browser: Browser, tmp_path: Path) -> None:
    """A malicious node that joined: its device name, and its reason for not loading."""
    told = '<img src=x onerror="window.ran = true"><script>window.ran = true</script>'
    registration = build_registration("evil")
    registration = replace(registration, facts=replace(registration.facts, model=told))
    async with (
        Site(
            tmp_path, (), models={"fairy-tales": DEMO_MODEL}, coordinator_arguments=GATEWAY
        ) as site,
        open_channel(site.address, None) as channel,
        visiting(browser, site.gateway) as visitor,
    ):
        client = site.client
        node = FakeAgent(channel, registration)
        node.answer = lambda command: FailedPreconditionError(told)
        await node.connect()
        with pytest.raises(FailedPreconditionError):
            await client.deploy(parse_spec({**SPEC, "source": "evil", "layers": "evil=0:12"}))
        page = await visitor.enter(client)
        await expect(page.locator("main")).to_contain_text(told)
        await page.goto(f"{visitor.url}/#/deployments/tales")
        await expect(page.locator("[role=alert]")).to_contain_text(told)
        await go(page, "events")
        await expect(page.locator("main")).to_contain_text(told)
        assert not await page.evaluate("'ran' in window") and not visitor.problems
        await node.vanish()


@pytest.mark.long
async def test_a_keyboard_is_enough(site: Site, browser: Browser) -> None:
    """Each link, field and button is reached by the Tab key."""
    async with visiting(browser, site.cluster.coordinator.gateway, PHONE) as visitor:
        page = await visitor.enter(site.client)
        for screen in await screens(page):
            await go(page, screen)
            await page.evaluate("document.activeElement.blur()")
            fields = page.locator("a, button:enabled, input, select, textarea, summary")
            wanted = await fields.filter(visible=True).count()
            reached = set()
            for _ in range(wanted):
                await page.keyboard.press("Tab")
                reached.add(
                    await page.evaluate(
                        "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
                    )
                )
            assert len(reached) == wanted, screen


@pytest.mark.long
async def test_a_model_is_planned_loads_and_goes_by_buttons(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    """A model of a size whose loading is visible."""
    await asyncio.to_thread(write_large_model, tmp_path / "large")
    await site.client.add_model(tmp_path / "large", "large")
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        await go(page, "deployments")
        await page.get_by_label("Model").select_option("large")
        deploy = page.get_by_role("button", name="Deploy large")
        await expect(deploy).to_be_disabled()  # before its plan is shown
        await page.get_by_role("button", name="Show the plan").click()
        await expect(
            page.get_by_role("region", name="The plan").locator("tbody tr").first
        ).to_be_visible()
        # The page's progress of the load, recorded as it changes: it may be gone when a test looks.
        await page.evaluate(
            "seen = []; new MutationObserver(() => document.querySelectorAll('.loading').forEach("
            "one => seen.push(one.textContent.trim()))).observe(document.body,"
            " { subtree: true, childList: true, characterData: true })"
        )
        await deploy.click()
        await page.locator("tbody a", has_text="large").click()
        await expect(page.locator("h2 .phase")).to_have_text("ready", timeout=120_000)
        seen = await page.evaluate("seen")
        assert any(re.search(r"[\d.]+ MiB of [\d.]+ MiB", text) for text in seen), seen
        delete = page.get_by_role("button", name="Delete")
        await expect(delete).to_be_disabled()
        await page.get_by_label("Type its name").fill("large")
        await delete.click()
        await expect(page.get_by_role("region", name="Deployments")).not_to_contain_text("large")
        assert not visitor.problems


@pytest.mark.long
async def test_nothing_is_cut_while_a_page_is_in_use(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    """A plan, a refusal, recorded steps and an answer; and the view of a key's holder before and
    after its login."""
    url = site.cluster.coordinator.gateway
    _, key = await site.client.create_key(
        "application-with-a-long-name", ["tales"], tokens_per_minute=123_456_789
    )
    async with visiting(browser, url) as visitor, visiting(browser, url) as other:
        page = await visitor.enter(site.client)
        await show(page, "now")
        await page.get_by_role("button", name="Record steps").click()
        await page.get_by_text("No step ran").or_(page.locator(".timeline")).first.wait_for()
        assert await cuts_at_all_sizes(page) == []
        await show(page, "deployments/tales")
        await page.get_by_role("button", name="Find a better placement").click()
        await expect(
            page.locator("section", has_text="Move").get_by_role("status").first
        ).not_to_have_text("…")
        assert await cuts_at_all_sizes(page) == []
        await show(page, "playground")
        for message, top_p in (("Once " + "a" * 200, ""), ("twice", "7")):
            await page.get_by_label("Top p").fill(top_p)
            await page.get_by_label("Message").fill(message)
            await page.get_by_role("button", name="Send").click()
            await expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        await expect(page.locator(".problem")).to_contain_text("top_p")
        assert await cuts_at_all_sizes(page) == [] and await breaches(page) == []
        assert [problem for problem in visitor.problems if "400" not in problem] == []
        page = await other.another("")
        await page.get_by_label("API key").wait_for()
        assert await cuts_at_all_sizes(page) == [] and await breaches(page) == []
        await page.get_by_label("API key").fill(key)
        await page.get_by_role("button", name="Show").click()
        await live(page)
        assert await all_faults(page) == [] and await breaches(page) == []
    await site.client.revoke_key("application-with-a-long-name")


async def test_the_map_shows_direction_speed_and_memory(site: Site, browser: Browser) -> None:
    """The figures of nodes that are connected add up; each hop of the pipeline ends in an arrow."""
    url = site.cluster.coordinator.gateway
    async with visiting(browser, url) as visitor, visiting(browser, url) as other:
        picture = await (await visitor.enter(site.client)).evaluate(PICTURE)
        nodes = picture["nodes"]
        for name, free in (("a", 10 << 30), ("b", 14 << 30), ("c", 20 << 30)):
            nodes[name] |= {"status": "connected", "budget": 20 << 30, "free": free}
        nodes["c"]["status"] = "away"
        for stage in picture["deployments"]["tales"]["stages"].values():
            stage["tokens_per_s"] = 12.34
        page = await crowded_page(other, picture, site.client)
        await expect(page.locator(".sum")).to_have_text(
            "40.0 GiB in 2 nodes; the largest model that fits has 24.0 GiB, with its KV cache."
        )
        box = page.locator('.node[data-node="a"]')
        await expect(box).to_contain_text("10.0 GiB held, 10.0 GiB free")
        await expect(box).to_contain_text("layers 0:4 · 12.3 tokens/s")
        hops = page.locator(".hop[marker-end]")
        assert await hops.locator("title").all_text_contents() == [
            "From a to b",
            "From b to c",
            "From c to a",
        ]


async def test_the_playground_shows_what_an_answer_waits_for(site: Site, browser: Browser) -> None:
    """A request that waits, and one that reads its prompt, show their counts; the system prompt is
    sent first."""
    url = site.cluster.coordinator.gateway
    async with visiting(browser, url) as visitor, visiting(browser, url) as other:
        picture = await (await visitor.enter(site.client)).evaluate(PICTURE)
        page = await crowded_page(other, picture, site.client)
        bodies = list[dict[str, Any]]()
        await page.route(
            "**/dashboard/chat", lambda route: bodies.append(route.request.post_data_json)
        )
        await show(page, "playground")
        send = page.get_by_role("button", name="Send")
        stop = page.get_by_role("button", name="Stop")
        await expect(send).to_be_disabled()
        await expect(send).to_have_accessible_description("Write a message first.")
        await page.get_by_text("System prompt", exact=True).click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Message").fill("Once")
        await send.click()
        state = page.locator("p.figures")
        await expect(state).to_contain_text(
            re.compile(r"Waiting for the first token, [\d.]+ s so far")
        )
        await page.evaluate(
            "send('change', { deployments: { tales: { running: 7, waiting: 3 } } })"
        )
        await expect(state).to_contain_text("7 requests run and 3 wait at tales")
        own = {
            "who": "operator",
            "deployment": "tales",
            "state": "reading",
            "prompt": 120,
            "read": 34,
            "age_s": 0,
        }
        await page.evaluate("own => send('change', { requests: { r1: own } })", own)
        await expect(state).to_contain_text("Reading: 34 of 120 prompt tokens")
        await stop.click()
        await expect(stop).to_be_disabled()
        roles = [(message["role"], message["content"]) for message in bodies[0]["messages"]]
        assert roles == [("system", "Be brief."), ("user", "Once")]
        for index, _ in enumerate(await page.locator(".gaps span").all()):
            colour = await page.locator(f".gap-{index}").evaluate(
                "one => getComputedStyle(one).backgroundColor"
            )
            assert (colour == "rgba(0, 0, 0, 0)") == (index == 0), (
                "the legend has the colours of the parts"
            )


async def test_an_answer_streams_into_the_playground_until_it_is_stopped(
    site: Site, browser: Browser
) -> None:
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        await go(page, "playground")
        await page.get_by_label("New tokens").fill("400")
        await page.get_by_label("Message").fill("Once upon a time")
        await page.get_by_role("button", name="Send").click()
        parts, stop = page.locator(".turn.assistant span"), page.get_by_role("button", name="Stop")
        await expect(parts.nth(3)).to_be_attached()  # it may be nothing but space
        await expect(stop).to_be_enabled()
        before = await parts.count()
        await expect(parts.nth(before + 3)).to_be_attached()
        await stop.click()
        await expect(stop).to_be_disabled()
        await expect(page.locator(".turn.assistant .figures")).to_contain_text(
            re.compile(r"[\d.]+ tokens/s")
        )
        assert await parts.count() < 400
        assert not await breaches(page)

        async def free() -> bool:
            return not (await site.client.deployment("tales")).active_requests

        await site.until(free)
        assert not visitor.problems


@pytest.mark.long
async def test_back_and_forward_are_the_browsers(site: Site, browser: Browser) -> None:
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        await go(page, "deployments")
        await page.locator("tbody a", has_text="tales").click()
        await expect(page.locator("h2").first).to_contain_text("tales")
        await page.go_back()
        await expect(page.locator("h2").first).to_have_text("Deployments")
        await page.go_back()
        await expect(page.locator(".map")).to_be_visible()
        await page.go_forward()
        await page.go_forward()
        await expect(page.locator("h2").first).to_contain_text("tales")
        await page.reload()
        await expect(page.locator("h2").first).to_contain_text("tales")
        assert not visitor.problems


async def test_a_hidden_tab_ends_its_stream_and_has_the_newest_picture_when_it_is_seen(
    site: Site, browser: Browser
) -> None:
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        await page.goto(f"{visitor.url}/#/deployments/tales")
        before = await served(page)
        await site.until(lambda: visitor.streams == 1)
        await hide(page, True)
        await site.until(lambda: visitor.streams == 0)
        await one_answer(site.client)
        assert await served(page) == before
        await hide(page, False)
        await expect(page.locator("main")).to_contain_text(f"{before + 1} served")
        assert visitor.streams == 1 and not visitor.problems


async def served(page: Page) -> int:
    """The number of served requests on a deployment's screen."""
    text = await page.locator("p", has_text=" served.").inner_text()
    return int(text.split()[-2])


async def one_answer(client: Client) -> None:
    async for _ in client.generate("tales", "Once", max_new_tokens=2, ignore_eos=True):
        pass


async def test_a_tab_keeps_the_token_and_gives_it_to_others(site: Site, browser: Browser) -> None:
    """After a reload, and in a second tab. Programs on other ports have the cookie, which opens
    nothing without it."""
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        await page.reload()
        await live(page)
        second = await visitor.another("site")
        await live(second)
        cookies = {cookie["name"]: cookie["value"] for cookie in await visitor.context.cookies()}
        sent = {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
        for path in ("session", "stream", "do/outlook?name=tales"):
            answer = await Http(visitor.url).get(f"/dashboard/{path}", sent)
            assert (answer.status, answer.error["code"]) == (403, "no_token")
        assert not visitor.problems
        for tab in (page, second):
            await tab.close()
        alone = await visitor.another("site")
        await expect(alone.get_by_role("alert")).to_contain_text("session token is missing")
        # A login in another tab lets it in.
        await visitor.enter(site.client)


@pytest.mark.long
async def test_eight_tabs_share_one_stream_and_each_can_act(site: Site, browser: Browser) -> None:
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        first = await visitor.enter(site.client)
        await first.goto(f"{visitor.url}/#/deployments/tales")
        tabs = [first, *[await visitor.another("deployments/tales") for _ in range(TABS - 1)]]
        for tab in tabs:
            await live(tab)
        before = await served(first)
        await one_answer(site.client)
        for tab in tabs:
            await expect(tab.locator("main")).to_contain_text(f"{before + 1} served")
            await tab.get_by_role("button", name="Find a better placement").click()
            await expect(
                tab.locator("section", has_text="Move").get_by_role("alert")
            ).to_contain_text("by hand")
        assert visitor.streams == 1
        # The page with the stream hides, or leaves; another one of them takes the stream over.
        await hide(first, True)
        await tabs[1].close()
        await one_answer(site.client)
        for tab in tabs[2:]:
            await expect(tab.locator("main")).to_contain_text(f"{before + 2} served")
        await site.until(lambda: visitor.streams == 1)


@pytest.mark.long
async def test_a_tab_that_stands_still_keeps_the_stream_from_no_other(
    site: Site, browser: Browser
) -> None:
    """As a tab does that waits in a debugger: it holds the lock and sends nothing more."""
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        first = await visitor.enter(site.client)
        second = await visitor.another("deployments/tales")
        await live(second)
        before = await served(second)
        debugger = await visitor.context.new_cdp_session(first)
        await debugger.send("Debugger.enable")
        await debugger.send("Debugger.pause")
        await one_answer(site.client)
        await expect(second.locator("main")).to_contain_text(f"{before + 1} served", timeout=60_000)


@pytest.mark.long
async def test_an_empty_site_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    async with (
        Site(tmp_path / "site", (), coordinator_arguments=GATEWAY) as site,
        visiting(browser, site.gateway, PHONE) as visitor,
    ):
        page = await visitor.enter(site.client)
        for screen in await screens(page):
            await go(page, screen)
            await expect(page.locator("main")).to_contain_text(EMPTY.get(screen, ""))
            await page.screenshot(path=tmp_path / f"empty-{screen}.png")
            assert not await breaches(page), screen
            for line in await lines(page):
                parsed(line)
        assert not visitor.problems


@pytest.mark.long
async def test_each_line_of_edgectl_does_what_its_screen_does(site: Site, browser: Browser) -> None:
    async with visiting(browser, site.cluster.coordinator.gateway) as visitor:
        page = await visitor.enter(site.client)
        found = set()
        for screen in (*await screens(page), "deployments/tales"):
            await page.goto(f"{visitor.url}/#/{screen}")
            await expect(page.locator("p.line").first).to_be_visible()
            found |= set(await lines(page))
    assert {"edgectl get nodes -o wide", "edgectl delete deployment tales"} <= found
    for line in found:
        words = parsed(line)
        if line.startswith(tuple(f"edgectl {read}" for read in READS)) and "-w" not in words:
            await run(EDGECTL, "--coordinator", site.cluster.address, *words)


async def lines(page: Page) -> list[str]:
    return await page.locator("p.line code").all_inner_texts()


def parsed(line: str) -> list[str]:
    """The words of a line after `edgectl`, which its own parser takes. Raises its UsageError
    otherwise."""
    name, *words = shlex.split(line)
    assert name == "edgectl"
    command: Any = typer.main.get_group(app)
    context = command.make_context(name, list(words))
    while hasattr(command, "resolve_command"):
        name, found, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        command = found.load() if isinstance(found, Lazy) else found
        context = command.make_context(name, rest, parent=context)
    return words
