"""The dashboard's routes: the page, its files, the door, and the streams of the site and of an API
key.

Rights are a session's, which a link of an operator opened, or an API key for its own models
(`door.py`). The cookie has none elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, RootModel
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeshard.domain.errors import DeniedError, EdgeShardError, InvalidArgumentError, NotFoundError
from edgeshard.domain.identity import shown_identity
from edgeshard.gateway.access.auth import Authenticator, Caller
from edgeshard.gateway.access.bodies import read_body
from edgeshard.gateway.connections.connection_limits import neighbourhood
from edgeshard.gateway.errors import error_response, json_response
from edgeshard_coordinator.dashboard.door import SESSION_TTL_S, Kind, Login, Session, shows_token
from edgeshard_coordinator.dashboard.feed import Feed
from edgeshard_coordinator.dashboard.operator import Operator
from edgeshard_coordinator.dashboard.operator_actions import GET, POST
from edgeshard_coordinator.dashboard.places import PageOrigin, PageOrigins

ROOT = "/dashboard/"
"""The beginning of all paths except the page's own, which is /."""
TOKEN = "x-edgeshard-token"
ALIVE_S = 10.0
"""Interval of messages to a viewer without news, so that proxies in between keep the connection."""
ASSETS = Path(__file__).parent / "assets"
ALWAYS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer."""

FormT = TypeVar("FormT", bound=BaseModel)


class _Login(BaseModel):
    """The body of a login: a link's secret, or an API key."""

    secret: str | None = None
    key: str | None = None


class _Asked(RootModel[dict[str, Any]]):
    """The body of an action."""


class Dashboard:
    """The part of the gateway that browsers see. `operator` returns an operator's services, by
    name, address and a check of the right to them. `keys` checks API keys, and `usage` returns the
    view of a session with one. `now` returns seconds of a steady clock. `api` is the gateway with
    the check of keys, which playgrounds use."""

    def __init__(
        self,
        door: Login,
        places: PageOrigins,
        feed: Feed,
        operator: Callable[[str, str, Callable[[], object]], Operator],
        keys: Authenticator,
        usage: Callable[[Session], Feed],
        now: Callable[[], float],
    ) -> None:
        self._door = door
        self._places = places
        self._now = now
        self._feed = feed
        self._operator = operator
        self._keys = keys
        self._usage = usage
        self._assets = {
            path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file()
        }
        self._actions: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        self.api: ASGIApp | None = None
        routes = [
            Route("/", self._page),
            Route(f"{ROOT}assets/{{name:path}}", self._asset),
            Route(f"{ROOT}session", self._enter, methods=["POST"]),
            Route(f"{ROOT}session", self._session, methods=["GET"]),
            Route(f"{ROOT}session", self._leave, methods=["DELETE"]),
            Route(f"{ROOT}stream", self._stream),
            Route(f"{ROOT}usage", self._usage_stream),
            Route(f"{ROOT}chat", self._chat, methods=["POST"]),
            Route(f"{ROOT}do/{{what}}", self._ask, methods=["GET"]),
            Route(f"{ROOT}do/{{what}}", self._act, methods=["POST"]),
        ]
        self.paths = [route.path for route in routes]
        self._app = Starlette(routes=routes, exception_handlers={EdgeShardError: _refused})
        self._app.router.redirect_slashes = False

    def end_of(self, who: str) -> None:
        """End all links, sessions and running actions of an operator, or of an API key."""
        self._door.end_of(who)
        for action in self._actions.pop(who, ()):
            action.cancel()

    def takes(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request is for the dashboard: any path below ROOT, and / for who reads HTML."""
        if f"{scope['path']}/".startswith(ROOT):
            return True
        return (
            scope["path"] == "/"
            and scope["method"] == "GET"
            and "text/html" in headers.get("accept", "")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ALWAYS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            self._places.of_host(Headers(scope=scope).get("host", ""))
        except EdgeShardError as error:
            await error_response(error)(scope, receive, tell)
            return
        await self._app(scope, receive, tell)

    def _place_of(self, request: Request) -> PageOrigin:
        """The place of the page that sent a request. Raises DeniedError for any other page than the
        dashboard's."""
        return self._places.of_origin(
            request.headers.get("host", ""), request.headers.get("origin")
        )

    def _cookie_of(self, request: Request) -> str | None:
        """A browser sends no origin if it only reads, so it may be at either place that its Host
        stands for."""
        places = self._places.of_host(request.headers.get("host", ""))
        cookies = (request.cookies.get(place.cookie) for place in places)
        return next((cookie for cookie in cookies if cookie is not None), None)

    def _session_of(self, request: Request) -> Session:
        """The session of a request that only reads."""
        return self._shown(request, self._cookie_of(request))

    def _checked(self, request: Request) -> Session:
        """The session of a request that changes something, whose page the browser names."""
        return self._shown(request, request.cookies.get(self._place_of(request).cookie))

    def _shown(self, request: Request, cookie: str | None) -> Session:
        """The session of a cookie and its token. A browser sends the cookie to programs on other
        ports of its host, too; none of them has the token. From then on the connection counts as
        one with a key."""
        session = self._door.session(cookie, self._now())
        if not shows_token(session, request.headers.get(TOKEN, "")):
            raise DeniedError(
                "the session token is missing: use an open page of the dashboard, or open the link "
                "that "
                "edgectl dashboard prints",
                field=TOKEN,
                reason="NO_TOKEN",
            )
        if (connection := request.scope["state"].get("connection")) is not None:
            connection.showed_key(session.who)
        return session

    async def _done(
        self, check: Callable[[], object], who: str, action: Coroutine[Any, Any, Any]
    ) -> Response:
        """The answer of an action of the operator `who`; it ends when its right does, which `check`
        then names."""
        running = asyncio.ensure_future(action)
        self._actions[who].add(running)
        try:
            await asyncio.wait({running})
        finally:
            running.cancel()
            self._actions[who].discard(running)
            if not self._actions[who]:
                del self._actions[who]
        if running.cancelled():
            check()
        return json_response(running.result())

    # Routes

    async def _page(self, request: Request) -> Response:
        """Its files are named relative to it; after a path in whole, since a browser may be there
        without the slash."""
        place, *others = self._places.of_host(request.headers.get("host", ""))
        if others or not place.path:
            return FileResponse(ASSETS / "index.html", headers={"vary": "Accept"})
        text = (ASSETS / "index.html").read_text().replace('"dashboard/', f'"{place.path}{ROOT}')
        return HTMLResponse(text, headers={"vary": "Accept"})

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            raise NotFoundError(f"{name[:80]!r} does not exist here", reason="UNKNOWN_URL")
        return FileResponse(ASSETS / name, headers={"cache-control": "no-cache"})

    async def _enter(self, request: Request) -> Response:
        """A link's secret becomes a cookie and the token of its pages, and so does an API key. No
        other answer has either."""
        place, address = self._place_of(request), _address(request)
        _check_type(request)
        login = await read_body(request, _Login, stranger=neighbourhood(address.rpartition(":")[0]))
        if login.key is not None:
            caller = self._keys.enter(login.key, f"POST {ROOT}session", address)
            cookie, session = self._door.enter_by_key(caller.identity, caller.models, self._now())
        elif login.secret is not None:
            cookie, session = self._door.enter(login.secret, self._now())
        else:
            raise InvalidArgumentError("secret is missing, and so is key", field="secret")
        answer = json_response({**_told(session), "token": session.token})
        answer.set_cookie(
            place.cookie, cookie, max_age=int(SESSION_TTL_S), httponly=True, **_scope_of(place)
        )
        return answer

    async def _session(self, request: Request) -> Response:
        """The logged-in user."""
        return json_response(_told(self._session_of(request)))

    async def _leave(self, request: Request) -> Response:
        self._checked(request)
        place = self._place_of(request)
        self._door.leave(request.cookies[place.cookie])
        answer = json_response({})
        answer.delete_cookie(place.cookie, httponly=True, **_scope_of(place))
        return answer

    async def _stream(self, request: Request) -> Response:
        self._session_of(request).check_is(Kind.OPERATOR)
        return self._streamed(request, self._feed)

    async def _usage_stream(self, request: Request) -> Response:
        session = self._session_of(request)
        session.check_is(Kind.APPLICATION)
        return self._streamed(request, self._usage(session))

    def _streamed(self, request: Request, feed: Feed) -> Response:
        """The header has nginx pass each event on at once."""
        events = self._events(request, feed)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _events(self, request: Request, feed: Feed) -> AsyncGenerator[bytes]:
        """Pictures and changes, until the session ends."""
        said_at = self._now()
        async with aclosing(feed.follow()) as updates:
            async for kind, text in updates:
                try:
                    self._session_of(request)
                except EdgeShardError:
                    yield b"event: ended\ndata: {}\n\n"
                    return
                if kind or self._now() - said_at >= ALIVE_S:
                    said_at = self._now()
                    yield b"event: %s\ndata: %s\n\n" % (kind.encode(), text) if kind else b":\n\n"

    async def _ask(self, request: Request) -> Response:
        check = partial(self._session_of, request)
        session = check()
        session.check_is(Kind.OPERATOR)
        ask = GET.get(request.path_params["what"])
        if ask is None:
            raise NotFoundError(
                f"{request.url.path[:80]} does not exist here", reason="UNKNOWN_URL"
            )
        operator = self._operator(session.who, _address(request), check)
        return await self._done(check, session.who, ask(operator, dict(request.query_params)))

    async def _act(self, request: Request) -> Response:
        check = partial(self._checked, request)
        session = check()
        session.check_is(Kind.OPERATOR)
        act = POST.get(request.path_params["what"])
        if act is None:
            raise NotFoundError(
                f"{request.url.path[:80]} does not exist here", reason="UNKNOWN_URL"
            )
        _check_type(request)
        request.scope["state"]["caller"] = Caller(session.who, check=check)
        body = await read_body(request, _Asked)
        operator = self._operator(session.who, _address(request), check)
        return await self._done(check, session.who, act(operator, body.root))

    async def _chat(self, request: Request) -> Response:
        """A conversation of the playground: the gateway's own answer, for the operator or the
        key."""
        check = partial(self._checked, request)
        session = check()
        caller = Caller(session.who, session.models, check=check)
        assert self.api is not None
        return _Inner(self.api, {**request.scope, "path": "/v1/chat/completions"}, caller)


class _Inner(Response):
    """The answer of the gateway to a request that was admitted already."""

    def __init__(self, api: ASGIApp, scope: Scope, caller: Caller) -> None:
        self._api = api
        self._scope = scope
        self._caller = caller
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**self._scope, "raw_path": self._scope["path"].encode(), "query_string": b""}
        inner["state"] = {**scope.get("state", {}), "caller": self._caller}
        for own in ("app", "router", "endpoint", "path_params", "route"):
            inner.pop(own, None)
        await self._api(inner, receive, send)


def _told(session: Session) -> dict[str, Any]:
    return {"who": shown_identity(session.who), "kind": session.kind}


def _scope_of(place: PageOrigin) -> Any:
    """The paths to which browsers send its cookie."""
    return {"path": place.path or "/", "samesite": "strict", "secure": place.is_secure}


def _address(request: Request) -> str:
    client = request.client
    return "" if client is None else f"{client.host}:{client.port}"


def _check_type(request: Request) -> None:
    """Raise InvalidArgumentError for a body that a form of any page could send."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise InvalidArgumentError("the body must be application/json", field="content-type")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeShardError)
    return error_response(error)
