"""A browser at the dashboard, as far as the coordinator sees one: its cookies, its page's origin
and token."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from http.cookies import SimpleCookie
from typing import Any, Protocol

from edgeshard import Client
from tests.support.http import Answer, Http, Stream

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Entered(Protocol):
    """A site at which an operator requests links."""

    @property
    def client(self) -> Client: ...


class Jar:
    """The cookies of one host, which browsers send to all of its ports."""

    def __init__(self) -> None:
        self.cookies: dict[tuple[str, str], str] = {}

    def take(self, answer: Answer) -> None:
        for name, cookie in SimpleCookie(answer.headers.get("set-cookie", "")).items():
            self.cookies[name, cookie["path"]] = cookie.value
            if cookie["max-age"] == "0":
                del self.cookies[name, cookie["path"]]

    def shown(self, path: str) -> str | None:
        """The cookie sent with a request for `path`."""
        pairs = ((name, value, under.rstrip("/")) for (name, under), value in self.cookies.items())
        sent = [
            f"{name}={value}"
            for name, value, under in pairs
            if path == under or path.startswith(f"{under}/")
        ]
        return "; ".join(sent) or None


class Browser:
    """A browser at the page of `origin`, by default the target of `http`, under `prefix`."""

    def __init__(
        self, http: Http, jar: Jar | None = None, origin: str = "", prefix: str = ""
    ) -> None:
        self.http = nobody(http)
        self.jar = jar or Jar()
        self.origin = origin or http.url
        self.prefix = prefix
        self.token = ""

    @classmethod
    async def of(cls, site: Entered, http: Http) -> Browser:
        """A browser that an operator's link logged in."""
        browser = cls(http)
        answer = await browser.enter({"secret": await secret_of(site)})
        assert answer.status == 200, answer.body
        return browser

    @property
    def cookie(self) -> str:
        shown = self.jar.shown(f"{self.prefix}/")
        assert shown is not None
        return shown

    async def enter(self, body: Mapping[str, str], **changes: str | None) -> Answer:
        """Show a link's secret or an API key."""
        answer = await self.post("/dashboard/session", body, **changes)
        self.jar.take(answer)
        self.token = answer.json.get("token", self.token)
        return answer

    async def leave(self) -> Answer:
        answer = await self.send("DELETE", "/dashboard/session", {})
        self.jar.take(answer)
        return answer

    def headers(self, **changes: str | None) -> dict[str, str]:
        """The headers of a request that changes something."""
        sent = {
            "host": self.origin.partition("://")[2],
            "cookie": self.jar.shown(f"{self.prefix}/"),
            "origin": self.origin,
            "x-edgeshard-token": self.token,
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return {name: value for name, value in sent.items() if value is not None}

    async def send(self, method: str, path: str, body: Any = None, **changes: str | None) -> Answer:
        return await self.http.send(method, f"{self.prefix}{path}", body, self.headers(**changes))

    async def post(self, path: str, body: Any, **changes: str | None) -> Answer:
        return await self.send("POST", path, body, **changes)

    async def get(self, path: str, **changes: str | None) -> Answer:
        """Browsers send no origin if they only read from their own page."""
        return await self.send("GET", path, **{"origin": None, **changes})

    async def events(self, path: str = "/dashboard/stream") -> AsyncGenerator[tuple[str, Any]]:
        """The kinds of a stream's events, with their data."""
        async with self.http.opened(
            "GET", f"{self.prefix}{path}", None, self.headers(origin=None)
        ) as stream:
            assert (stream.status, stream.headers["content-type"]) == (
                200,
                "text/event-stream; charset=utf-8",
            )
            async for event in events_of(stream):
                yield event


async def events_of(stream: Stream) -> AsyncGenerator[tuple[str, Any]]:
    text = b""
    async for part in stream.parts():
        text += part
        *events, text = text.split(b"\n\n")
        for event in events:
            kind, _, data = event.partition(b"\ndata: ")
            if data:
                yield kind.decode().removeprefix("event: "), json.loads(data)


def nobody(http: Http) -> Http:
    """Without a key."""
    return Http(http.url, None, http.tls)


async def secret_of(site: Entered) -> str:
    return (await site.client.dashboard_link()).url.partition("#open=")[2]


async def enter(site: Entered, http: Http, secret: str = "") -> Answer:
    return await Browser(http).enter({"secret": secret or await secret_of(site)})
