"""The dashboard's routes: the page, its files, the door, and the streams of the site and of an API key.

Rights are a session's, which a link of an operator opened, or an API key for its own models (`door.py`). The cookie has
none elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeshard.domain.errors import DeniedError, EdgeShardError, InvalidArgumentError, NotFoundError
from edgeshard.gateway.access.auth import Authenticator, Caller
from edgeshard.gateway.errors import error_response, json_response
from edgeshard_coordinator.dashboard.actions import GET, POST, Operator
from edgeshard_coordinator.dashboard.door import SESSION_TTL_S, Door, Kind, Session, shows_token
from edgeshard_coordinator.dashboard.feed import Feed
from edgeshard_coordinator.dashboard.places import Place, Places

ROOT = "/dashboard/"
"""The beginning of all paths but that of the page itself, which is at /."""
TOKEN = "x-edgeshard-token"
MOST_BODY_BYTES = 1 << 20
ALIVE_S = 10.0
"""A viewer who has heard nothing for so long gets a word, so that proxies in between keep the connection."""
ASSETS = Path(__file__).parent / "assets"
ALWAYS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer."""


class Dashboard:
    """The part of the gateway that browsers see. `operator` gives what an operator may do, by name and address; `keys`
    checks API keys, and `usage` gives what a session with one sees; `now` seconds of a steady clock. `api` is the
    gateway behind the check of keys, which playgrounds use."""

    def __init__(
        self,
        door: Door,
        places: Places,
        feed: Feed,
        operator: Callable[[str, str], Operator],
        keys: Authenticator,
        usage: Callable[[Session], Feed],
        now: Callable[[], float],
    ) -> None:
        self._door, self._places, self._now = door, places, now
        self._feed, self._operator, self._keys, self._usage = feed, operator, keys, usage
        self._assets = {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file()}
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

    def takes(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request is for the dashboard: any path below ROOT, and / for who reads HTML."""
        if f"{scope['path']}/".startswith(ROOT):
            return True
        return scope["path"] == "/" and scope["method"] == "GET" and "text/html" in headers.get("accept", "")

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

    def _place_of(self, request: Request) -> Place:
        """Where the page is that sent a request. Raises DeniedError for any other page than the dashboard's."""
        return self._places.of_origin(request.headers.get("host", ""), request.headers.get("origin"))

    def _cookie_of(self, request: Request) -> str | None:
        """A browser says no origin where it only reads, so it may be at either place that its Host stands for."""
        places = self._places.of_host(request.headers.get("host", ""))
        shown = (request.cookies.get(place.cookie) for place in places)
        return next((cookie for cookie in shown if cookie is not None), None)

    def _session_of(self, request: Request) -> Session:
        return self._door.session(self._cookie_of(request), self._now())

    def _checked(self, request: Request) -> Session:
        """The session of a request that changes something: its page must show that it can read the token."""
        cookie = request.cookies.get(self._place_of(request).cookie)
        session = self._door.session(cookie, self._now())
        if not shows_token(session, request.headers.get(TOKEN, "")):
            raise DeniedError("the page did not show its token: load it again", field=TOKEN, reason="NO_TOKEN")
        return session

    def _operator_of(self, session: Session, request: Request) -> Operator:
        """What the operator may do. Raises DeniedError for the session of an API key."""
        session.check_is(Kind.OPERATOR)
        return self._operator(session.who, _address(request))

    # Routes

    async def _page(self, request: Request) -> Response:
        """Its files are named as beside it; behind a path in whole, since a browser may be there without the slash."""
        place, *others = self._places.of_host(request.headers.get("host", ""))
        if others or not place.path:
            return FileResponse(ASSETS / "index.html", headers={"vary": "Accept"})
        text = (ASSETS / "index.html").read_text().replace('"dashboard/', f'"{place.path}{ROOT}')
        return HTMLResponse(text, headers={"vary": "Accept"})

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            raise NotFoundError(f"there is no {name[:80]!r} here", reason="UNKNOWN_URL")
        return FileResponse(ASSETS / name, headers={"cache-control": "no-cache"})

    async def _enter(self, request: Request) -> Response:
        """A link's secret becomes a cookie, and so does an API key."""
        place, body = self._place_of(request), await _body(request)
        secret, key = body.get("secret"), body.get("key")
        if isinstance(key, str):
            caller = self._keys.enter(key, f"POST {ROOT}session", _address(request))
            cookie, session = self._door.enter_by_key(caller.identity, caller.models, self._now())
        elif isinstance(secret, str):
            cookie, session = self._door.enter(secret, self._now())
        else:
            raise InvalidArgumentError("secret is missing, and so is key", field="secret")
        answer = json_response(_told(session))
        answer.set_cookie(place.cookie, cookie, max_age=int(SESSION_TTL_S), httponly=True, **_scope_of(place))
        return answer

    async def _session(self, request: Request) -> Response:
        """Who is logged in, and the token of its pages, which no page of another origin can read."""
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
        return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def _events(self, request: Request, feed: Feed) -> AsyncGenerator[bytes]:
        """Pictures and changes, until the session ends."""
        said_at = self._now()
        async with aclosing(feed.follow()) as told:
            async for kind, text in told:
                try:
                    self._session_of(request)
                except EdgeShardError:
                    yield b"event: ended\ndata: {}\n\n"
                    return
                if kind or self._now() - said_at >= ALIVE_S:
                    said_at = self._now()
                    yield b"event: %s\ndata: %s\n\n" % (kind.encode(), text) if kind else b":\n\n"

    async def _ask(self, request: Request) -> Response:
        operator = self._operator_of(self._session_of(request), request)
        ask = GET.get(request.path_params["what"])
        if ask is None:
            raise NotFoundError(f"there is no {request.url.path[:80]} here", reason="UNKNOWN_URL")
        return json_response(await ask(operator, dict(request.query_params)))

    async def _act(self, request: Request) -> Response:
        operator = self._operator_of(self._checked(request), request)
        act = POST.get(request.path_params["what"])
        if act is None:
            raise NotFoundError(f"there is no {request.url.path[:80]} here", reason="UNKNOWN_URL")
        return json_response(await act(operator, await _body(request)))

    async def _chat(self, request: Request) -> Response:
        """A conversation of the playground: the gateway's own answer, for the operator or the key."""
        session = self._checked(request)
        assert self.api is not None
        return _Inner(self.api, {**request.scope, "path": "/v1/chat/completions"}, Caller(session.who, session.models))


class _Inner(Response):
    """The answer of the gateway to a request that was let in already."""

    def __init__(self, api: ASGIApp, scope: Scope, caller: Caller) -> None:
        self._api, self._scope, self._caller = api, scope, caller
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**self._scope, "raw_path": self._scope["path"].encode(), "query_string": b""}
        inner["state"] = {**scope.get("state", {}), "caller": self._caller}
        for own in ("app", "router", "endpoint", "path_params", "route"):
            inner.pop(own, None)
        await self._api(inner, receive, send)


def _told(session: Session) -> dict[str, Any]:
    return {"who": session.who, "kind": session.kind, "token": session.token}


def _scope_of(place: Place) -> Any:
    """Where browsers send its cookie."""
    return {"path": place.path or "/", "samesite": "strict", "secure": place.is_secure}


def _address(request: Request) -> str:
    client = request.client
    return "" if client is None else f"{client.host}:{client.port}"


async def _body(request: Request) -> dict[str, Any]:
    """Raises InvalidArgumentError for what is not an object in JSON of bounded size."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise InvalidArgumentError("the body must be application/json", field="content-type")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MOST_BODY_BYTES:
            raise InvalidArgumentError(f"the body is over {MOST_BODY_BYTES} bytes", field="body")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise InvalidArgumentError("the body is not an object in JSON", field="body")
    return body


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeShardError)
    return error_response(error)
