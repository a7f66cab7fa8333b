"""An API key at the dashboard: its own models and its own usage, and nothing of an operator's."""

from __future__ import annotations

import json
from contextlib import aclosing
from itertools import count
from typing import Any, cast

import pytest
from edgeshard_coordinator.dashboard.app import Dashboard
from edgeshard_coordinator.dashboard.door import MOST_OF_KEY
from edgeshard_coordinator.dashboard.operator_actions import GET, POST

from tests.support.http import Http
from tests.support.http_browser import Browser, nobody
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]

CHAT = {
    "model": "tales",
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 5,
    "temperature": 0,
}
NAMES = map("app-{}".format, count())


async def came_in(site: Site, http: Http, *models: str, **limits: Any) -> tuple[Browser, str, str]:
    """A browser that showed a new key, the key's name, and the key."""
    name = next(NAMES)
    _, key = await site.client.create_key(name, models, **limits)
    browser = Browser(http)
    answer = await browser.enter({"key": key})
    assert answer.status == 200, answer.body
    assert (answer.json["who"], answer.json["kind"]) == (f"key/{name}", "application")
    assert key not in answer.body.decode() and key not in answer.headers["set-cookie"]
    return browser, name, key


async def picture_of(browser: Browser) -> dict[str, Any]:
    async with aclosing(browser.events("/dashboard/usage")) as events:
        kind, picture = await anext(events)
    assert kind == "picture"
    return cast(dict[str, Any], picture)


async def test_a_key_sees_its_models_and_what_it_used(site: Site, http: Http) -> None:
    browser, _, key = await came_in(site, http, "tales", tokens_per_minute=10_000)
    other, _, _ = await came_in(site, http)
    picture = await picture_of(browser)
    assert picture["deployments"] == {"tales": {"model": "fairy-tales", "phase": "ready"}}
    nothing = {
        "requests": 0,
        "running": 0,
        "prompt_tokens": 0,
        "new_tokens": 0,
        "tokens_per_minute": 10_000,
    }
    assert picture["usage"] == nothing
    by_api = (await Http(http.url, key).post("/v1/chat/completions", CHAT)).json["usage"]
    by_page = (await browser.post("/dashboard/chat", CHAT)).json["usage"]
    used = {
        "requests": 2,
        "prompt_tokens": 2 * by_api["prompt_tokens"],
        "new_tokens": 2 * by_page["completion_tokens"],
    }
    assert (await picture_of(browser))["usage"] == nothing | used
    theirs = await picture_of(other)
    assert theirs["usage"]["requests"] == 0 and {"tales", "handy"} <= set(theirs["deployments"])


async def test_nothing_of_nodes_others_and_other_deployments_is_there(
    site: Site, http: Http
) -> None:
    browser, name, _ = await came_in(site, http, "tales")
    _, other, _ = await came_in(site, http)
    picture = await picture_of(browser)
    assert set(picture) == {"site", "deployments", "usage"} and set(picture["site"]) == {"version"}
    text = json.dumps(picture)
    nodes = [node.node_id for node in await site.client.nodes()]
    assert not any(word in text for word in ("handy", other, name, "stages", "operator", *nodes))


async def test_a_stream_goes_on_as_things_change(site: Site, http: Http) -> None:
    browser, _, key = await came_in(site, http, "tales")
    async with aclosing(browser.events("/dashboard/usage")) as events:
        await anext(events)
        await Http(http.url, key).post("/v1/chat/completions", CHAT)
        changes = [await anext(events)]
        while changes[-1][1]["usage"].get("new_tokens", 0) < 5:
            changes.append(await anext(events))
    assert all(kind == "change" for kind, _ in changes)


async def test_the_playground_is_for_its_models_alone(site: Site, http: Http) -> None:
    browser, _, _ = await came_in(site, http, "tales")
    for model in ("handy", "missing"):
        refused = await browser.post("/dashboard/chat", {**CHAT, "model": model})
        assert (refused.status, refused.error["code"]) == (403, "key_scope"), (
            "it hears nothing of whether it is there"
        )


async def test_all_routes_of_operators_refuse_a_key(site: Site, http: Http) -> None:
    """Each route is in one of the lists; a new one has to be put there."""
    browser, _, _ = await came_in(site, http)
    operator = await Browser.of(site, http)
    nothing = cast(Any, None)
    paths = set(Dashboard(nothing, nothing, nothing, nothing, nothing, nothing, nothing).paths)
    everybodys = {"/", "/dashboard/assets/{name:path}", "/dashboard/session"}
    assert paths - everybodys == {
        "/dashboard/stream",
        "/dashboard/do/{what}",
        "/dashboard/usage",
        "/dashboard/chat",
    }
    reads = ["/dashboard/stream", *(f"/dashboard/do/{what}" for what in (*GET, *POST, "missing"))]
    for path in reads:
        answer = await browser.get(f"{path}?name=tales")
        assert (answer.status, answer.error["code"]) == (403, "session_kind"), path
    for what in (*POST, *GET, "missing"):
        answer = await browser.post(f"/dashboard/do/{what}", {"name": "tales", "typed": "tales"})
        assert (answer.status, answer.error["code"]) == (403, "session_kind"), what
    assert (await site.client.deployment("tales")).phase.value == "ready"
    assert (await operator.get("/dashboard/usage")).status == 403, "an operator has no key"
    for path in ("/v1/models", "/metrics"):
        assert (await nobody(http).get(path, {"cookie": browser.cookie})).status == 401, (
            "the cookie is no key"
        )


async def test_a_session_ends_when_its_key_is_revoked(site: Site, http: Http) -> None:
    browser, name, _ = await came_in(site, http, "tales")
    other, _, _ = await came_in(site, http, "tales")
    async with aclosing(browser.events("/dashboard/usage")) as events:
        await anext(events)
        await site.client.revoke_key(name)
        kinds = [kind async for kind, _ in events]
    assert kinds[-1] == "ended"
    for path in ("session", "usage"):
        assert (await browser.get(f"/dashboard/{path}")).status == 401
    assert (await browser.post("/dashboard/chat", CHAT)).status == 401
    assert (await other.get("/dashboard/session")).status == 200
    await site.client.create_key(name, ("tales",))
    assert (await browser.get("/dashboard/session")).status == 401, (
        "another key of its name is another"
    )


async def test_wrong_keys_are_refused_as_the_api_refuses_them(site: Site, http: Http) -> None:
    _, name, key = await came_in(site, http)
    for wrong in ("", "guess", "EMPTY", key[:-1], key + "a", key.upper()):
        answer = await Browser(http).enter({"key": wrong})
        told = await Http(http.url, wrong or "guess").get("/v1/models")
        assert (answer.status, answer.error) == (401, told.error), wrong
        assert "set-cookie" not in answer.headers
    await site.client.revoke_key(name)
    assert (await Browser(http).enter({"key": key})).status == 401
    entries = [
        entry for entry in await site.client.audit(50) if entry.what == "POST /dashboard/session"
    ]
    assert entries and all(entry.who == "nobody" for entry in entries)
    elsewhere = await Browser(http).enter(
        {"key": (await site.client.create_key(name))[1]}, origin="https://evil.example"
    )
    assert elsewhere.status == 403


async def test_the_oldest_session_of_a_key_ends_when_there_are_too_many(
    site: Site, http: Http
) -> None:
    first, _, key = await came_in(site, http)
    operator = await Browser.of(site, http)
    for _ in range(MOST_OF_KEY):
        newest = Browser(http)
        assert (await newest.enter({"key": key})).status == 200
    assert (await first.get("/dashboard/session")).status == 401
    for browser in (newest, operator):
        assert (await browser.get("/dashboard/session")).status == 200
