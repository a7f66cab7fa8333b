"""The addresses of the dashboard for browsers: the gateway itself, and an address in front of it.
Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.gateway.connections.listen import host_of, is_loopback_name

COOKIE = "edgeshard-dashboard"
_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class PageOrigin:
    """An address at which browsers find the page. `origin` is its origin as they send it, such as
    https://edge.example:8443. `path` precedes all of the gateway's paths, "" or such as /edge."""

    origin: str
    path: str = ""

    @property
    def host(self) -> str:
        """Host and port as a browser sends them in Host."""
        return urlsplit(self.origin).netloc

    @property
    def is_secure(self) -> bool:
        return self.origin.startswith("https:")

    @property
    def cookie(self) -> str:
        """The name of its cookie.

        Browsers send the cookies of all ports of a host, each possibly another site's dashboard,
        and cookies of `/` to all paths. `__Host-` requires the path /, so that browsers would send
        the cookie to every other page of the host. A place with a path has `__Secure-` instead."""
        prefix = "" if not self.is_secure else "__Secure-" if self.path else "__Host-"
        return f"{prefix}{COOKIE}-{urlsplit(self.origin).port or 0}{self.path.replace('/', '.')}"


@dataclass(frozen=True, slots=True)
class PageOrigins:
    """`secure` is true if the gateway speaks TLS. `hosts` returns whether it has such a name.
    `front` is the address at a proxy in front of it, which may send either Host."""

    secure: bool
    hosts: Callable[[str], bool]
    front: PageOrigin | None = None

    def url(self, direct: str) -> str:
        """The page's, without a slash at its end; `direct` is the gateway's."""
        return direct if self.front is None else f"{self.front.origin}{self.front.path}"

    def of_host(self, host: str) -> tuple[PageOrigin, ...]:
        """The places of the page for a request with this Host. Raises DeniedError for a page of a
        name that was made to point here."""
        if self.front is not None and host in (
            self.front.host,
            f"{self.front.host}:{_port(self.front.origin)}",
        ):
            return (self.front,)
        if _port(f"//{host}") is None or not self.hosts(host_of(f"//{host}")):
            raise DeniedError(
                "the header Host does not name this gateway: use the gateway's own address",
                field="host",
                reason="FOREIGN_HOST",
            )
        direct = PageOrigin(f"{'https' if self.secure else 'http'}://{host}")
        return (direct,) if self.front is None else (direct, self.front)

    def of_origin(self, host: str, origin: str | None) -> PageOrigin:
        """The place of the page that sent a request. Raises DeniedError if another page than the
        dashboard's had the browser send it; other ports are other pages."""
        for place in self.of_host(host):
            if place.origin == origin:
                return place
        raise DeniedError(
            "the header Origin does not name the dashboard: open the dashboard itself",
            field="origin",
            reason="FOREIGN_ORIGIN",
        )


def parse_place(text: str) -> PageOrigin:
    """The place of a URL such as https://edge.example/edge/. Raises InvalidArgumentError for other
    texts, and DeniedError for plain HTTP beyond loopback, since a cookie could be intercepted."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    host, path = parts.hostname or "", parts.path.rstrip("/")
    if parts.scheme not in _PORTS or not host or parts.username or parts.query or parts.fragment:
        raise _refused(text)
    if not re.fullmatch(r"[a-z0-9._:-]+", host) or not _PATH.fullmatch(path):
        raise _refused(text)
    if parts.scheme == "http" and not is_loopback_name(host):
        raise DeniedError(
            f"--dashboard-url {text[:200]!r} is plain HTTP beyond loopback, where others could "
            "read the "
            "cookie: use TLS at the proxy, and an https URL",
            field="dashboard-url",
            reason="TLS_REQUIRED",
        )
    url_host = f"[{host}]" if ":" in host else host
    return PageOrigin(
        f"{parts.scheme}://{url_host}{'' if port in (None, _PORTS[parts.scheme]) else f':{port}'}",
        path,
    )


def _refused(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"--dashboard-url {text[:200]!r}: give scheme and host, and optionally port and path, such "
        "as "
        "https://edge.example or https://example.com:8443/edge; a path contains letters, digits "
        "and "
        "._~-",
        field="dashboard-url",
    )


def _port(url: str) -> int | None:
    """The port of a URL, the scheme's if it names none, 0 without a scheme; None if it is no
    number."""
    try:
        parts = urlsplit(url)
        return _PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError:
        return None
