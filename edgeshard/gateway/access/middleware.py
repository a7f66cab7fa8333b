"""The steps of every HTTP request before and after its route: its target in one form, a request id,
the key, counting, headers that a route adds, errors as bodies."""

from __future__ import annotations

import re
import time
import traceback
import uuid
from typing import Protocol
from urllib.parse import unquote

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeshard.domain.errors import DeniedError, EdgeShardError, InvalidArgumentError
from edgeshard.gateway.access.auth import Authenticator, Caller, unending
from edgeshard.gateway.access.bodies import Bodies
from edgeshard.gateway.access.cors import NOBODY, Origins
from edgeshard.gateway.connections.listen import host_of, is_loopback_name
from edgeshard.gateway.errors import error_response
from edgeshard.gateway.request_metrics import HttpMetrics


class Pages(Protocol):
    """An app of its own on the gateway's port. It checks Host and Origin by itself, and no other
    origin may read its answers."""

    api: ASGIApp | None
    """The gateway's routes with the check of keys, once they are made."""

    def takes(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request is for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


log = structlog.get_logger()

OPEN = frozenset({("GET", "/"), ("GET", "/health"), ("GET", "/version"), ("GET", "/api/version")})
"""The requests that are answered without a key: for a health check, and for the version."""
OPEN_LOCALLY = frozenset({("GET", "/docs"), ("GET", "/openapi.json")})
"""Further ones on loopback: a person reads them in a browser, which sends no key."""
_KEY_HEADERS = ("x-api-key", "api-key")
"""Headers of a key that clients of other services send in place of Authorization."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class GatewayMiddleware:
    """The outermost layer. With `local_only`, Host and Origin must have loopback's own names, or
    Origin one of `origins`: a page of any site, opened on this machine, can send requests here."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        metrics: HttpMetrics,
        *,
        local_only: bool,
        origins: Origins = NOBODY,
        pages: Pages | None = None,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics
        self._local_only = local_only
        self._origins = origins
        self._pages = pages
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, headers = scope["method"], Headers(scope=scope)
        client_request_id = headers.get("x-request-id", "")
        request_id = (
            client_request_id
            if _REQUEST_ID.fullmatch(client_request_id)
            else f"req_{uuid.uuid4().hex}"
        )
        began, status = time.monotonic(), 0
        is_page = False

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                allowed = [] if is_page else self._origins.headers(headers)
                own = [(b"x-request-id", request_id.encode()), *allowed, *added_headers(scope)]
                message["headers"] = [*message.get("headers", ()), *own]
                await send(message)
                if method == "HEAD":
                    await send({"type": "http.response.body", "body": b""})
            elif method != "HEAD":
                await send(message)

        scope.setdefault("state", {})["bodies"] = self._bodies
        try:
            scope = canonical(scope)
            headers = Headers(scope=scope)
            # The page itself is for browsers, which never request it by HEAD.
            is_page = self._pages is not None and self._pages.takes(
                {**scope, "method": method}, headers
            )
            if is_page:
                assert self._pages is not None
                await self._pages(scope, receive, tell)
                return
            if self._origins.is_preflight(scope["method"], headers):
                self._check_local(headers)
                await Response(status_code=204, headers=self._origins.preflight(headers))(
                    scope, receive, tell
                )
                return
            scope["state"]["caller"] = self._enter(scope, headers)
            await self._app(scope, receive, tell)
        except EdgeShardError as error:
            await error_response(error, scope["path"])(scope, receive, tell)
        except Exception as error:
            # Its text may quote the request.
            where = [
                f"{frame.filename}:{frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)[-4:]
            ]
            log.error("http_failed", route=_route(scope), error=type(error).__name__, where=where)
        finally:
            self._metrics.request_ended(method, _route(scope), status, time.monotonic() - began)

    def _enter(self, scope: Scope, headers: Headers) -> Caller:
        self._check_local(headers)
        what = (scope["method"], scope["path"])
        if what in OPEN or (self._local_only and what in OPEN_LOCALLY):
            return Caller("", frozenset(), check=unending)
        caller = self._authenticator.enter(_shown_key(headers), " ".join(what), _address(scope))
        if (connection := scope["state"].get("connection")) is not None:
            connection.showed_key(caller.identity)
        return caller

    def _check_local(self, headers: Headers) -> None:
        """Raise DeniedError for a request that a page of another site has a browser send.

        A request of HTTP/1.0 may lack Host; no browser sends such a request.
        """
        if not self._local_only:
            return
        named = headers.get("host")
        called = None if named is None else host_of(f"//{named}")
        origin = None if self._origins.allows(headers) else headers.get("origin")
        for name, host in (("Host", called), ("Origin", origin and host_of(origin))):
            if host is not None and not is_loopback_name(host):
                named_host = "another machine" if host else "no machine"
                raise DeniedError(
                    f"{name} names {named_host}, but this address serves only programs on this "
                    "machine: use 127.0.0.1",
                    field=name.lower(),
                    reason="FOREIGN_HOST",
                )


def _shown_key(headers: Headers) -> str | None:
    """The key of a request: that of Authorization goes before other headers."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    header_keys = (headers.get(name, "").strip() for name in _KEY_HEADERS)
    return next((key for key in header_keys if key), None)


def _address(scope: Scope) -> str:
    host, port = scope.get("client") or ("", 0)
    return f"{host}:{port}"


def _route(scope: Scope) -> str:
    """The route's pattern, so that no caller can make a new name for a metric."""
    return getattr(scope.get("route"), "path", "other")


_STATE = "answer_headers"


def add_header(request: Request, name: str, value: str) -> None:
    """Have the answer to a request carry a header, whichever response it is."""
    request.scope["state"].setdefault(_STATE, []).append(
        (name.encode("latin-1"), value.encode("latin-1"))
    )


def added_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers that were added for the answer to a request."""
    headers: list[tuple[bytes, bytes]] = scope["state"].get(_STATE, [])
    return headers


_ABSOLUTE = re.compile(r"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_AUTHORITY = re.compile(r"[A-Za-z0-9._~:\[\]-]+")


def canonical(scope: Scope) -> Scope:
    """A copy of a request's scope as routes and rights are written.

    HEAD becomes GET. Slashes at the end and empty segments are removed from the path: no redirect
    is needed, which would have to infer the client's scheme and host. The authority of an absolute
    target replaces Host. Raises InvalidArgumentError naming `target` for an authority that is not a
    host and a port.
    """
    copy = dict(scope)
    if scope["method"] == "HEAD":
        copy["method"] = "GET"
    raw = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    path = scope["path"]
    if (absolute := _ABSOLUTE.fullmatch(raw)) is not None:
        authority = absolute[1]
        if not _AUTHORITY.fullmatch(authority):
            raise InvalidArgumentError(
                "target: its authority is not HOST or HOST:PORT",
                field="target",
                reason="BAD_TARGET",
            )
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        copy["headers"] = [(b"host", authority.encode("latin-1")), *others]
        path = unquote(absolute[2] or "/")
    if path.startswith("/"):
        path = "/" + "/".join(part for part in path.split("/") if part)
    copy["path"] = path
    copy["raw_path"] = path.encode()
    return copy
