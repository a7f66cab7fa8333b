"""The dashboard's routes: the page, its files, the operator's door, and the stream of the site.

Rights are a session's, which a link opened (`door.py`); API keys have none here, and the cookie has none elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeshard.domain.errors import DeniedError, EdgeShardError, InvalidArgumentError, NotFoundError
from edgeshard.gateway.access.auth import Caller
from edgeshard.gateway.connections.listen import host_of
from edgeshard.gateway.errors import error_response, json_response
from edgeshard_coordinator.dashboard.actions import GET, POST, Operator
from edgeshard_coordinator.dashboard.door import SESSION_TTL_S, Door, Session, shows_token
from edgeshard_coordinator.dashboard.feed import Feed

ROOT = "/dashboard/"
"""The beginning of all paths but that of the page itself, which is at /."""
COOKIE = "edgeshard-dashboard"
TOKEN = "x-edgeshard-token"
MOST_BODY_BYTES = 1 << 20
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


@dataclass(frozen=True, slots=True)
class Public:
    """Where browsers find the gateway: `secure` where it speaks TLS, and the `hosts` that a request may name."""

    secure: bool
    hosts: Callable[[str], bool]


class Dashboard:
    """The part of the gateway that browsers see. `operator` gives what an operator may do, by name and address; `now`
    seconds of a steady clock. `api` is the gateway behind the check of keys, which playgrounds use."""

    def __init__(
        self, door: Door, feed: Feed, operator: Callable[[str, str], Operator], public: Public, now: Callable[[], float]
    ) -> None:
        self._door, self._feed, self._operator, self._public, self._now = door, feed, operator, public, now
        self._assets = {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*") if path.is_file()}
        self.api: ASGIApp | None = None
        routes = [
            Route("/", self._page),
            Route(f"{ROOT}assets/{{name:path}}", self._asset),
            Route(f"{ROOT}session", self._enter, methods=["POST"]),
            Route(f"{ROOT}session", self._session, methods=["GET"]),
            Route(f"{ROOT}session", self._leave, methods=["DELETE"]),
            Route(f"{ROOT}stream", self._stream),
            Route(f"{ROOT}chat", self._chat, methods=["POST"]),
            Route(f"{ROOT}do/{{what}}", self._ask, methods=["GET"]),
            Route(f"{ROOT}do/{{what}}", self._act, methods=["POST"]),
        ]
        self._app = Starlette(routes=routes, exception_handlers={EdgeShardError: _refused})

    def takes(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request is for the dashboard: any path below ROOT, and / for who reads HTML."""
        if scope["path"].startswith(ROOT):
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
            self._check_host(Headers(scope=scope))
        except EdgeShardError as error:
            await error_response(error)(scope, receive, tell)
            return
        await self._app(scope, receive, tell)

    def _check_host(self, headers: Headers) -> None:
        """Raise DeniedError for a page of a name that was made to point here."""
        if not self._public.hosts(host_of(f"//{headers.get('host', '')}")):
            raise DeniedError("Host names another machine than this gateway's", field="host", reason="FOREIGN_HOST")

    def _check_origin(self, headers: Headers) -> None:
        """Raise DeniedError for a request that another page has the browser send; other ports are other pages."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is None or urlsplit(origin).netloc != host:
            raise DeniedError("Origin names another page than the dashboard", field="origin", reason="FOREIGN_ORIGIN")

    def _cookie_of(self, request: Request) -> str:
        """Its name. Browsers send the cookies of all ports of a host, where another site may have its dashboard."""
        return f"{'__Host-' if self._public.secure else ''}{COOKIE}-{request.url.port or 0}"

    def _session_of(self, request: Request) -> Session:
        return self._door.session(request.cookies.get(self._cookie_of(request)), self._now())

    def _checked(self, request: Request) -> Session:
        """The session of a request that changes something: its page must show that it can read the token."""
        self._check_origin(request.headers)
        session = self._session_of(request)
        if not shows_token(session, request.headers.get(TOKEN, "")):
            raise DeniedError("the page did not show its token: load it again", field=TOKEN, reason="NO_TOKEN")
        return session

    def _operator_of(self, session: Session, request: Request) -> Operator:
        client = request.client
        return self._operator(session.who, "" if client is None else f"{client.host}:{client.port}")

    # Routes

    async def _page(self, request: Request) -> Response:
        return FileResponse(ASSETS / "index.html", headers={"vary": "Accept"})

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            raise NotFoundError(f"there is no {name[:80]!r} here", reason="UNKNOWN_URL")
        return FileResponse(ASSETS / name, headers={"cache-control": "no-cache"})

    async def _enter(self, request: Request) -> Response:
        """A link's secret becomes a cookie."""
        self._check_origin(request.headers)
        secret = (await _body(request)).get("secret")
        if not isinstance(secret, str):
            raise InvalidArgumentError("secret is missing", field="secret")
        cookie, session = self._door.enter(secret, self._now())
        answer = json_response(_told(session))
        answer.set_cookie(
            self._cookie_of(request),
            cookie,
            max_age=int(SESSION_TTL_S),
            httponly=True,
            samesite="strict",
            secure=self._public.secure,
        )
        return answer

    async def _session(self, request: Request) -> Response:
        """Who is logged in, and the token of its pages, which no page of another origin can read."""
        return json_response(_told(self._session_of(request)))

    async def _leave(self, request: Request) -> Response:
        self._checked(request)
        self._door.leave(request.cookies[self._cookie_of(request)])
        answer = json_response({})
        answer.delete_cookie(self._cookie_of(request), httponly=True, samesite="strict", secure=self._public.secure)
        return answer

    async def _stream(self, request: Request) -> Response:
        self._session_of(request)
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncGenerator[bytes]:
        """Pictures and changes, until the session ends."""
        async with aclosing(self._feed.follow()) as told:
            async for kind, text in told:
                try:
                    self._session_of(request)
                except EdgeShardError:
                    yield b"event: ended\ndata: {}\n\n"
                    return
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
        """A conversation of the playground: the gateway's own answer, for the operator."""
        session = self._checked(request)
        assert self.api is not None
        return _Inner(self.api, {**request.scope, "path": "/v1/chat/completions"}, Caller(session.who))


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
    return {"who": session.who, "token": session.token}


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
