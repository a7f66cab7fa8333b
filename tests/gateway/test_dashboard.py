"""The dashboard of a real site over HTTP: the operator's login, the stream, an operator's actions,
and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
from edgeshard_coordinator.dashboard.operator_actions import POST

from edgeshard.cli.render.views import layers_text
from edgeshard.domain.identity import Role
from tests.support.http import Http
from tests.support.http_browser import HTML, Browser, enter, nobody, secret_of
from tests.support.patches import patched
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]


async def test_who_reads_html_gets_the_page_and_all_others_what_they_always_got(http: Http) -> None:
    page = await nobody(http).get("/", HTML)
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept"
    policy = page.headers["content-security-policy"]
    assert (
        "script-src 'self'" in policy
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    assert b"<script>" not in page.body and b"style=" not in page.body
    for method, headers in (("GET", {}), ("HEAD", HTML), ("GET", {"accept": "*/*"})):
        plain = await nobody(http).send(method, "/", None, headers)
        assert plain.headers["content-type"].startswith("text/plain")
        assert plain.body == (b"" if method == "HEAD" else b"EdgeShard is running")


async def test_each_file_of_the_page_is_there_and_nothing_else_is(http: Http) -> None:
    page = (await nobody(http).get("/", HTML)).body.decode()
    for name in ("style.css", "main.js", "vendor/preact.js", "store.js"):
        answer = await nobody(http).get(f"/dashboard/assets/{name}")
        assert answer.status == 200 and name in page
        assert b"http://" not in answer.body.replace(b"http://www.w3.org/", b"") or name.startswith(
            "vendor/"
        )
    for name in ("../app.py", "%2e%2e/app.py", "vendor", "", "missing.js", "..%2fapp.py"):
        assert (await nobody(http).get(f"/dashboard/assets/{name}")).status == 404, name


async def test_a_link_becomes_a_cookie_once(site: Site, http: Http) -> None:
    secret = await secret_of(site)
    answer = await enter(site, http, secret)
    cookie = answer.headers["set-cookie"].lower()
    assert all(
        word in cookie for word in ("httponly", "samesite=strict", "path=/", "max-age=43200")
    )
    assert (answer.json["who"], secret in answer.body.decode()) == ("operator", False)
    for used in (secret, "guess"):
        again = await enter(site, http, used)
        assert (again.status, again.error["code"]) == (401, "dashboard_link")
        assert "set-cookie" not in again.headers


async def pictures(browser: Browser) -> AsyncGenerator[dict[str, Any]]:
    """The site as a page has it, after each message of the stream."""
    picture: dict[str, Any] = {}
    async with aclosing(browser.events()) as events:
        async for kind, value in events:
            picture = value if kind == "picture" else patched(picture, value)
            yield picture


async def picture_with(
    browser: Browser, condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The first picture that it holds for."""
    async with asyncio.timeout(60), aclosing(pictures(browser)) as seen:
        return await anext(picture async for picture in seen if condition(picture))


@asynccontextmanager
async def writing(site: Site) -> AsyncIterator[None]:
    """Requests run, one after the other."""

    async def ask() -> None:
        while True:
            async with aclosing(
                site.client.generate("tales", "Once", max_new_tokens=200, ignore_eos=True)
            ) as events:
                async for _ in events:
                    pass

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_the_stream_is_the_site(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    async with asyncio.timeout(60), aclosing(pictures(browser)) as seen:
        for _ in range(3):
            picture = await anext(seen)
    assert set(picture["nodes"]) == {"a", "b", "c"}
    deployment = await site.client.deployment("tales")
    found = picture["deployments"]["tales"]
    stages = [found["stages"][str(index)] for index in range(3)]
    assert ",".join(f"{s['node']}={s['first']}:{s['end']}" for s in stages) == layers_text(
        deployment.placement
    )
    assert (found["phase"], found["epoch"]) == ("ready", deployment.epoch)
    node = await site.client.node("a")
    assert picture["nodes"]["a"]["budget"] == node.facts.memory_budget_bytes
    assert set(picture["models"]) == {"fairy-tales", "handy"}


async def test_a_request_is_seen_while_it_runs_and_nothing_of_its_text(
    site: Site, http: Http
) -> None:
    browser = await Browser.of(site, http)
    body = {
        "model": "tales",
        "prompt": "A sentence that nobody else sees",
        "max_tokens": 240,
        "ignore_eos": True,
    }

    async def ask() -> None:
        while True:
            await http.post("/v1/completions", body)

    asking = asyncio.create_task(ask())
    picture = await picture_with(
        browser,
        lambda picture: (
            any(one["new"] for one in picture["requests"].values()) and _recent(picture)
        ),
    )
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    request = next(iter(picture["requests"].values()))
    assert (request["who"], request["deployment"], request["limit"]) == ("key/tests", "tales", 240)
    assert request["prompt"] > 0 and request["state"] == "writing"
    assert "sentence" not in json.dumps(picture)
    shares = _recent(picture)
    assert 0 < shares["p50"] <= shares["p95"] <= shares["p99"]
    await picture_with(browser, lambda picture: not picture["requests"])


def _recent(picture: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = (
        picture["deployments"]["tales"].get("recent", {}).get("between_tokens", {})
    )
    return found


async def test_steps_are_recorded_for_all_who_look_at_the_timeline(site: Site, http: Http) -> None:
    browsers = [await Browser.of(site, http) for _ in range(2)]

    async def looks() -> list[Any]:
        answers = await asyncio.gather(
            *(one.post("/dashboard/do/timeline", {"name": "tales"}) for one in browsers)
        )
        return [answer.json for answer in answers]

    async with writing(site), asyncio.timeout(60):
        # On a machine that is busy with other things, two seconds may have no step.
        slices = await looks()
        while not all(len(stage["bars"]) > 1 for stage in slices[0]["stages"]):
            await asyncio.sleep(0.1)
            slices = await looks()
    found = slices[0]
    assert found == slices[1]
    assert [stage["node"] for stage in found["stages"]] == ["a", "b", "c"] and found["span_us"] > 0
    for stage in found["stages"]:
        assert stage["steps"] > 1 and 0 < stage["computing"] <= 1
        ends = [begins + lasts for _, begins, lasts, *_ in stage["bars"]]
        assert min(bar[1] for bar in stage["bars"]) >= 0 and max(ends) <= found["span_us"] + 1, (
            "but for rounding"
        )
    assert [entry.target for entry in await site.client.audit(50) if entry.what == "Trace"] == [
        "tales"
    ]
    missing = await browsers[0].post("/dashboard/do/timeline", {"name": "missing"})
    assert (missing.status, missing.error["param"]) == (404, "deployment")


async def test_an_operators_trace_goes_on_while_a_timeline_is_open(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    async with writing(site):
        trace = asyncio.create_task(site.client.trace("tales", 5.0))
        async with asyncio.timeout(60):
            while (await browser.post("/dashboard/do/timeline", {"name": "tales"})).json != {
                "taken": True
            }:
                assert not trace.done(), "it said so at no time"
                await asyncio.sleep(0.05)
        assert all(stage.records for stage in await trace)


async def test_viewers_who_never_read_hold_up_nobody(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    async with AsyncExitStack() as stalled:
        for _ in range(20):
            await stalled.enter_async_context(
                http.opened("GET", "/dashboard/stream", None, browser.headers(), holds=4096)
            )
        async with writing(site), asyncio.timeout(60), aclosing(pictures(browser)) as seen:
            served = {(await anext(seen))["deployments"]["tales"]["served"]}
            while len(served) < 3:
                served.add((await anext(seen))["deployments"]["tales"]["served"])


async def test_an_operator_plans_deploys_and_deletes(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    spec = {
        "name": "seen",
        "model": "fairy-tales",
        "source": "a",
        "layers": "a=0:12",
        "concurrency": 1,
    }
    spec |= {"max_context": 64}
    plan = await browser.post("/dashboard/do/plan", {"spec": spec})
    assert [stage["node"] for stage in plan.json["stages"]] == ["a"]
    assert (await browser.post("/dashboard/do/deploy", {"spec": spec})).json == {"name": "seen"}
    await site.client.wait_ready("seen", 60)
    outlook = await browser.get("/dashboard/do/outlook?name=seen")
    assert [loss["node"] for loss in outlook.json["losses"]] == ["a"]
    look = await browser.post("/dashboard/do/replan", {"name": "seen", "look": True})
    assert look.status == 400 and "by hand" in look.error["message"], look.body
    typed = await browser.post("/dashboard/do/delete", {"name": "seen", "typed": "sean"})
    assert (typed.status, typed.error["param"]) == (400, "typed")
    assert (
        await browser.post("/dashboard/do/delete", {"name": "seen", "typed": "seen"})
    ).json == {}
    audit = [(entry.who, entry.what, entry.target) for entry in await site.client.audit(20)]
    said = [(what, target) for _, what, target in audit]
    assert ("Deploy", "seen") in said and ("DeleteDeployment", "seen") in said


async def test_a_coordinator_without_folders_adds_no_models_and_says_why(
    site: Site, http: Http
) -> None:
    browser = await Browser.of(site, http)
    assert (await browser.get("/dashboard/do/folders")).json == {"folders": []}
    for source, reason, told in (
        ("/etc", "outside_folders", "--model-folder"),
        ("owner/name", "hub_not_allowed", "--allow-hub"),
    ):
        answer = await browser.post("/dashboard/do/add-model", {"source": source})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            400,
            reason,
            "source",
        ), answer.body
        assert told in answer.error["message"]
    cancel = await browser.post("/dashboard/do/cancel-addition", {"number": 7})
    assert (cancel.status, cancel.error["param"]) == (404, "number")
    audit = [(entry.what, entry.result) for entry in await site.client.audit(20)]
    assert ("AddModel", "OUTSIDE_FOLDERS") in audit and ("CancelAddModel", "NOT_FOUND") in audit


async def test_a_model_in_use_stays_and_what_fits_is_told(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    answer = await browser.post("/dashboard/do/delete-model", {"name": "handy", "typed": "handy"})
    assert (answer.status, answer.error["code"]) == (400, "model_in_use")
    typed = await browser.post("/dashboard/do/delete-model", {"name": "handy", "typed": "hand"})
    assert (typed.status, typed.error["param"]) == (400, "typed")
    fits = await browser.post("/dashboard/do/fits", {"name": "fairy-tales"})
    assert (fits.json["context"], fits.json["concurrency"]) == (512, 8) and fits.json["stages"]
    deployed = await browser.post("/dashboard/do/fits", {"name": "handy"})
    assert deployed.status == 200, deployed.body


async def test_mistakes_name_their_field(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    for what, body, field in (
        ("deploy", {}, "spec"),
        ("deploy", {"spec": {"name": "x", "model": "missing"}}, "model"),
        ("delete", {"typed": "x"}, "name"),
        ("plan", {"spec": {"name": "x", "model": "handy", "depth": 1}}, "depth"),
    ):
        answer = await browser.post(f"/dashboard/do/{what}", body)
        assert (answer.status // 100, answer.error["param"]) == (4, field), answer.body
    for sent in ("[]", "{", "null"):
        answer = await http.send("POST", "/dashboard/do/plan", sent, browser.headers())
        assert answer.status == 400
    assert (await browser.post("/dashboard/do/reboot", {})).status == 404


async def test_a_conversation_is_the_gateways(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    body = {
        "model": "tales",
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    told = await browser.post("/dashboard/chat", body)
    asked = await http.post("/v1/chat/completions", body)
    assert told.json["choices"] == asked.json["choices"]
    refused = await browser.post("/dashboard/chat", {**body, "model": "missing"})
    assert refused.status == 404


UNSAFE = (*(f"do/{what}" for what in POST), "chat")


@pytest.mark.parametrize("path", UNSAFE)
async def test_another_page_cannot_act_through_a_browser(site: Site, http: Http, path: str) -> None:
    """It has the cookie sent, as a page of another port of this host has, and knows all but the
    token."""
    browser = await Browser.of(site, http)
    elsewhere: tuple[dict[str, str | None], ...] = (
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": None},
        {"x_edgeshard_token": None},
        {"x_edgeshard_token": "guess"},
        {"x_edgeshard_token": (await Browser.of(site, http)).token},
        {"cookie": None},
        {"host": "evil.example"},
    )
    for changes in elsewhere:
        answer = await browser.post(f"/dashboard/{path}", {}, **changes)
        assert answer.status in (401, 403), (changes, answer.body)
    formed = await browser.post(
        f"/dashboard/{path}", {}, content_type="text/plain", x_edgeshard_token=None
    )
    assert formed.status == 403, "as a form sends it, which a browser asks nobody about"


async def test_a_session_is_of_one_browser_until_it_leaves(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    assert (await browser.get("/dashboard/session")).json["who"] == "operator"
    assert (await http.send("DELETE", "/dashboard/session", {}, browser.headers())).status == 200
    for path in ("/dashboard/session", "/dashboard/stream", "/dashboard/do/outlook?name=tales"):
        assert (await browser.get(path)).status == 401
    assert (await browser.post("/dashboard/do/plan", {})).status == 401


async def test_keys_and_cookies_open_their_own_doors_alone(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    for path in ("/dashboard/stream", "/dashboard/session", "/dashboard/do/outlook?name=tales"):
        assert (await http.get(path)).status == 401, "with a key for everything"
    assert (await http.post("/dashboard/do/plan", {}, {"origin": http.url})).status == 401
    for path in ("/v1/models", "/metrics", "/api/tags"):
        assert (await nobody(http).get(path, browser.headers())).status == 401


async def test_no_other_origin_reads_anything(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    for path in ("/dashboard/session", "/dashboard/assets/main.js"):
        answer = await browser.get(path, origin="https://evil.example")
        assert "access-control-allow-origin" not in answer.headers
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    asked = await nobody(http).send("OPTIONS", "/dashboard/do/deploy", None, preflight)
    assert asked.status // 100 == 4 and "access-control-allow-origin" not in asked.headers


async def test_names_are_data(site: Site, http: Http) -> None:
    browser = await Browser.of(site, http)
    name = "<img src=x onerror=alert(1)>"
    answer = await browser.post("/dashboard/do/deploy", {"spec": {"name": name, "model": name}})
    assert answer.status == 400 and answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_who_joins_needs_certificates(site: Site, http: Http) -> None:
    answer = await (await Browser.of(site, http)).post("/dashboard/do/join", {"name": "box-1"})
    assert (answer.status, answer.error["code"]) == (400, "no_tls"), "this site is in plaintext"
    assert Role.AGENT.value not in answer.error["message"]
