"""Rights at the moment of the deed. A key, a session or an operator is revoked between the header
and the last byte of a request, for every route. Then the request has no effect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from edgeshard_coordinator.dashboard.app import TOKEN, Dashboard
from edgeshard_coordinator.dashboard.door import Kind, Login, Session
from edgeshard_coordinator.dashboard.feed import Feed
from edgeshard_coordinator.dashboard.opening import OwnConnection
from edgeshard_coordinator.dashboard.operator_actions import GET, POST
from edgeshard_coordinator.dashboard.places import PageOrigins
from starlette.routing import Route
from starlette.types import ASGIApp

from edgeshard.domain.errors import UnauthenticatedError
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import Generation, GenerationEvent
from edgeshard.gateway.access.auth import Caller
from edgeshard.gateway.access.bodies import STRANGER
from edgeshard.gateway.access.middleware import OPEN
from edgeshard.gateway.app import make_app
from edgeshard.proto.v1 import admin_pb2, admin_pb2_grpc
from edgeshard.rpc.access import CallFrom
from tests.support.scripted_gateway import Said

HOST = "127.0.0.1:8000"
KEY = "esk-secret"
OPERATOR = "operator/anna"
TALK = [{"role": "user", "content": "Once"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m", "prompt": [1, 2], "echo": True},
    "/v1/chat/completions": {"model": "m", "messages": TALK},
    "/v1/responses": {"model": "m", "input": "Once"},
    "/tokenize": {"model": "m", "prompt": "Once"},
    "/detokenize": {"model": "m", "tokens": [1, 2]},
    "/api/show": {"model": "m"},
    "/api/chat": {"model": "m", "messages": TALK},
    "/api/generate": {"model": "m", "prompt": "Once"},
}
"""A body for each route of the gateway that reads one."""
REFUSED = {"/v1/embeddings": 400}
"""The routes that refuse everybody before a body is read."""
RENDERING = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
} | {
    "/api/chat",
    "/api/generate",
}
"""The routes that wait for the tokenizer once the body is there."""


class Keys:
    """One key, until it is revoked."""

    def __init__(self) -> None:
        self.is_good = True

    def revoke(self) -> None:
        self.is_good = False

    def check(self) -> None:
        if not self.is_good:
            raise UnauthenticatedError("revoked", reason="INVALID_API_KEY")

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        if key != KEY:
            raise UnauthenticatedError("unknown", reason="INVALID_API_KEY")
        self.check()
        return Caller("key/app#1", check=self.check)


class Deeds(Said):
    """A backend that records its actions. `meanwhile` is called whenever it has to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = ["word"]
        self.done: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def _wait(self, deed: str) -> None:
        self.done.append(deed)
        await asyncio.sleep(0)
        self.meanwhile()

    def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.done.append("generate")
        return super().generate(model, generation, identity)

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        await self._wait("prompt")
        return await super().prompt(model, conversation, identity)

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        await self._wait("tokenize")
        return (1, 2)

    async def detokenize(self, model: str, tokens: Any, identity: str) -> str:
        await self._wait("detokenize")
        return "Once"


async def answered(
    app: ASGIApp,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    between: Callable[[], None] = lambda: None,
    connection: Any = None,
) -> tuple[int, bytes]:
    """Status and body of an answer; `between` is called before the last byte of the request is
    there."""
    parts = [(body[:-1], True), (body[-1:], False)] if body else [(b"", False)]
    waiting: Iterator[tuple[bytes, bool]] = iter(parts)
    status, answer = 0, b""

    async def receive() -> dict[str, Any]:
        part = next(waiting, None)
        if part is None:
            await asyncio.Event().wait()
        assert part is not None
        if not part[1]:
            between()
        return {"type": "http.request", "body": part[0], "more_body": part[1]}

    async def send(message: Any) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    path, _, query = path.partition("?")
    named = {"host": HOST, "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("10.0.0.7", 4000),
        "server": ("127.0.0.1", 8000),
        "state": {} if connection is None else {"connection": connection},
    }
    async with asyncio.timeout(20):
        await app(scope, receive, send)
    return status, answer


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Each method and path of an application."""
    return [
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    ]


def gateway() -> tuple[ASGIApp, list[tuple[str, str]], Deeds, Keys]:
    deeds, keys = Deeds(), Keys()
    app: Any = make_app(deeds, keys)
    return app, routes_of(app._app), deeds, keys


ROUTES = sorted((method, path) for method, path in gateway()[1] if method != "HEAD")
SHOWN = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_key_that_is_revoked_before_the_last_byte_gets_nothing(
    method: str, path: str
) -> None:
    """A new route needs a body in the table."""
    app, _, deeds, keys = gateway()
    body = b""
    if method == "GET":
        keys.revoke()
    elif path not in REFUSED:
        body = json.dumps(BODIES[path]).encode()
    status, _ = await answered(app, method, path.replace("{model}", "m"), SHOWN, body, keys.revoke)
    expected = 401 if (method, path) not in OPEN else 200
    assert status == REFUSED.get(path, expected)
    assert deeds.done == []


@pytest.mark.parametrize("path", sorted(RENDERING))
async def test_a_key_that_is_revoked_while_a_text_is_rendered_has_no_answer(path: str) -> None:
    app, _, deeds, keys = gateway()
    deeds.meanwhile = keys.revoke
    body = json.dumps(BODIES[path]).encode()
    status, _ = await answered(app, "POST", path, SHOWN, body)
    assert (status, keys.is_good, len(deeds.done)) == (401, False, 1)


async def test_answers_that_wait_for_others_do_not_begin_after_a_revocation() -> None:
    app, _, deeds, keys = gateway()
    deeds.texts = ["word"] * 4
    begin = deeds.generate

    def generate(
        model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        if len(deeds.done) == 3:
            keys.revoke()
        return begin(model, generation, identity)

    deeds.generate = generate  # type: ignore[method-assign]
    body = json.dumps({"model": "m", "prompt": [[1], [2]], "n": 16}).encode()
    status, _ = await answered(app, "POST", "/v1/completions", SHOWN, body)
    assert status == 401 and len(deeds.done) == 4


# The dashboard


class Actions:
    """An operator's actions, as `Operator`; `held` keeps it from being done."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.held: asyncio.Event | None = None

    def __getattr__(self, name: str) -> Any:
        async def act(*_: Any, **__: Any) -> Any:
            self.begun.append(name)
            if self.held is not None:
                await self.held.wait()
            self.done.append(name)
            raise UnauthenticatedError("done", reason="DONE")  # an answer of no form

        return act


class Page:
    """A dashboard, and a page of it that an operator or a key has open."""

    def __init__(self, kind: Kind = Kind.OPERATOR) -> None:
        numbers = count()
        self.door = Login(lambda: f"secret{next(numbers)}")
        self.keys, self.actions = Keys(), Actions()
        feed = Feed(lambda: {"site": {}})
        operator: Any = lambda who, address, check: self.actions  # noqa: E731 - takes what the dashboard gives
        places = PageOrigins(False, lambda host: True)
        self.dashboard = Dashboard(
            self.door, places, feed, operator, self.keys, lambda _: feed, lambda: 0.0
        )
        self.deeds = Deeds()
        self.app: Any = make_app(self.deeds, self.keys, pages=self.dashboard)
        self.cookie, self.session = self._entered(kind)

    def _entered(self, kind: Kind) -> tuple[str, Session]:
        if kind is Kind.OPERATOR:
            return self.door.enter(self.door.link(OPERATOR, 0.0), 0.0)
        return self.door.enter_by_key("key/app#1", None, 0.0)

    def revoke(self) -> None:
        self.keys.revoke()
        self.dashboard.end_of(self.session.who)

    def headers(self, **changes: str) -> dict[str, str]:
        cookie = f"edgeshard-dashboard-8000={self.cookie}"
        return {"cookie": cookie, "origin": f"http://{HOST}", TOKEN: self.session.token, **changes}

    async def asked(
        self,
        method: str,
        path: str,
        body: Any = None,
        between: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> tuple[int, Any]:
        sent = b"" if body is None else json.dumps(body).encode()
        status, answer = await answered(
            self.app, method, path, more.pop("headers", self.headers()), sent, between, **more
        )
        return status, json.loads(answer) if answer[:1] == b"{" else answer


ASKED: dict[str, dict[str, Any]] = {
    "plan": {"spec": {"name": "x", "model": "m"}},
    "deploy": {"spec": {"name": "x", "model": "m"}},
    "delete": {"name": "x", "typed": "x"},
    "replan": {"name": "x"},
    "join": {"name": "x"},
    "create-key": {"name": "x"},
    "revoke-key": {"name": "x"},
    "label": {"name": "x", "changes": ["zone=hall1"]},
    "remove-node": {"name": "x", "typed": "x"},
    "revoke-token": {"token_id": "x"},
    "timeline": {"name": "x"},
    "fits": {"name": "x"},
    "add-model": {"source": "/models/x"},
    "cancel-addition": {"number": 1},
    "delete-model": {"name": "x", "typed": "x"},
}
"""A body for each action."""
PAGES = {("GET", "/"), ("GET", "/dashboard/assets/{name:path}"), ("DELETE", "/dashboard/session")}
"""The routes for everybody, and the end of one's own session."""
READS = ["session", "stream", "usage", *(f"do/{what}?name=x" for what in GET)]


def test_each_route_of_the_dashboard_is_in_a_table() -> None:
    page = Page()
    found = {(method, path) for method, path in routes_of(page.dashboard._app) if method != "HEAD"}
    bodies = {("POST", f"/dashboard/{path}") for path in ("session", "chat", "do/{what}")}
    reads = {("GET", f"/dashboard/{path}") for path in ("session", "stream", "usage", "do/{what}")}
    assert found == PAGES | bodies | reads
    assert set(ASKED) == set(POST)


@pytest.mark.parametrize("what", POST)
async def test_an_operator_who_is_revoked_before_the_last_byte_does_nothing(what: str) -> None:
    page = Page()
    status, answer = await page.asked("POST", f"/dashboard/do/{what}", ASKED[what], page.revoke)
    assert (status, answer["error"]["code"]) == (401, "no_session") and page.actions.begun == []
    page = Page()
    status, answer = await page.asked("POST", f"/dashboard/do/{what}", ASKED[what])
    assert answer["error"]["code"] == "done" and page.actions.done, "the same is done for another"


@pytest.mark.parametrize(
    "path", [*(f"do/{what}" for what in POST), *(f"do/{what}?name=x" for what in GET)]
)
async def test_what_an_operator_does_ends_with_the_revocation(path: str) -> None:
    page = Page()
    page.actions.held = asyncio.Event()
    method, body = ("GET", None) if "?" in path else ("POST", ASKED[path.removeprefix("do/")])
    asking = asyncio.create_task(page.asked(method, f"/dashboard/{path}", body))
    while not page.actions.begun:  # noqa: ASYNC110 - nobody tells it
        await asyncio.sleep(0)
    page.revoke()
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (401, "no_session") and page.actions.done == []


@pytest.mark.parametrize("kind", Kind)
async def test_a_conversation_of_a_revoked_page_has_no_answer(kind: Kind) -> None:
    for rendered in (False, True):
        page = Page(kind)
        page.deeds.meanwhile = page.revoke if rendered else page.deeds.meanwhile
        between = (lambda: None) if rendered else page.revoke
        status, _ = await page.asked(
            "POST", "/dashboard/chat", BODIES["/v1/chat/completions"], between
        )
        assert status == 401 and "generate" not in page.deeds.done


@pytest.mark.parametrize("login", ["secret", "key"])
async def test_a_login_of_somebody_revoked_meanwhile_is_refused(login: str) -> None:
    page = Page(Kind.OPERATOR if login == "secret" else Kind.APPLICATION)
    shown = {"secret": page.door.link(OPERATOR, 0.0), "key": KEY}[login]
    origin = {"origin": f"http://{HOST}"}
    status, _ = await page.asked(
        "POST", "/dashboard/session", {login: shown}, page.revoke, headers=origin
    )
    assert status == 401


@pytest.mark.parametrize("path", READS)
async def test_a_cookie_without_the_token_opens_nothing(path: str) -> None:
    """Programs on other ports of the host have the cookie."""
    page = Page(Kind.APPLICATION if path == "usage" else Kind.OPERATOR)
    headers = page.headers()
    del headers[TOKEN]
    status, answer = await page.asked("GET", f"/dashboard/{path}", headers=headers)
    assert (status, answer["error"]["code"]) == (403, "no_token")
    assert page.session.token not in json.dumps(answer)
    page.revoke()
    assert (await page.asked("GET", f"/dashboard/{path}"))[0] == 401


async def test_only_the_login_returns_the_token() -> None:
    page = Page()
    shown = {"secret": page.door.link(OPERATOR, 0.0)}
    status, login = await page.asked(
        "POST", "/dashboard/session", shown, headers={"origin": f"http://{HOST}"}
    )
    assert status == 200 and len(login["token"]) > 5
    assert await page.asked("GET", "/dashboard/session") == (
        200,
        {"who": OPERATOR, "kind": "operator"},
    )


async def test_the_connection_of_a_page_counts_as_known() -> None:
    page = Page()
    known: list[str] = []
    connection = SimpleNamespace(showed_key=known.append)
    await page.asked(
        "GET", "/dashboard/session", connection=connection, headers=page.headers(**{TOKEN: "guess"})
    )
    assert known == []
    await page.asked("GET", "/dashboard/session", connection=connection)
    assert known == [OPERATOR]


async def test_a_stranger_sends_little_and_only_from_the_page() -> None:
    page, origin = Page(), {"origin": f"http://{HOST}"}
    large = {"secret": "x" * STRANGER.max_bytes}
    status, answer = await page.asked("POST", "/dashboard/session", large, headers=origin)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    status, answer = await page.asked(
        "POST", "/dashboard/session", large, headers={"origin": "https://evil.example"}
    )
    assert (status, answer["error"]["code"]) == (403, "foreign_origin"), "nothing of it is read"
    status, answer = await page.asked("POST", "/dashboard/session", [[]] * 9, headers=origin)
    assert status == 400


async def test_strangers_of_one_address_have_a_budget_of_memory() -> None:
    page, origin = Page(), {"origin": f"http://{HOST}"}
    bodies = page.app._bodies
    with bodies.room("address/10.0.0.7", bodies._budget.most_of_one):
        status, answer = await page.asked(
            "POST", "/dashboard/session", {"secret": "x"}, headers=origin
        )
    assert (status, answer["error"]["code"]) == (429, "too_many_bodies")


# Calls of the dashboard


async def test_each_call_of_an_action_checks_the_right() -> None:
    """An action may wait between two calls."""
    called: list[str] = []
    ends: list[Any] = []

    async def replan(request: Any, context: Any) -> Any:
        called.append("Replan")
        return admin_pb2.ReplanResponse()

    page = Page()
    audit: Any = SimpleNamespace(
        ended=lambda *said: ends.append(said[-1]), began=lambda *said: None
    )
    check = partial(page.door.session, page.cookie, 0.0)
    services = {"AdminService": SimpleNamespace(Replan=replan)}
    own = OwnConnection(services, audit, CallFrom("10.0.0.7:1", None, True), check)
    await own.call(admin_pb2_grpc.AdminServiceStub, "Replan", admin_pb2.ReplanRequest(), 5.0)
    page.revoke()
    with pytest.raises(UnauthenticatedError):
        await own.call(admin_pb2_grpc.AdminServiceStub, "Replan", admin_pb2.ReplanRequest(), 5.0)
    assert called == ["Replan"] and ends[1].reason == "NO_SESSION"
