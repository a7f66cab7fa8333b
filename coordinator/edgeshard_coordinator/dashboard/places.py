"""Where browsers find the dashboard: at the gateway itself, and at an address in front of it. Pure."""

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
class Place:
    """An address at which browsers find the page: its `origin` as they say it, such as https://edge.example:8443, and
    the `path` in front of all of the gateway's, "" or such as /edge."""

    origin: str
    path: str = ""

    @property
    def host(self) -> str:
        """Host and port as a browser says them in Host."""
        return urlsplit(self.origin).netloc

    @property
    def is_secure(self) -> bool:
        return self.origin.startswith("https:")

    @property
    def cookie(self) -> str:
        """The name of its cookie. Browsers send the cookies of all ports of a host, where another site may have its
        dashboard, and those of `/` to all paths. `__Host-` demands the path /, where every other page of the host would
        have the cookie sent along, so a place with a path has `__Secure-`."""
        prefix = "" if not self.is_secure else "__Secure-" if self.path else "__Host-"
        return f"{prefix}{COOKIE}-{urlsplit(self.origin).port or 0}{self.path.replace('/', '.')}"


@dataclass(frozen=True, slots=True)
class Places:
    """`secure` where the gateway speaks TLS; `hosts` tells whether it has such a name; `front` is where browsers find
    it behind a proxy, which may say either's Host."""

    secure: bool
    hosts: Callable[[str], bool]
    front: Place | None = None

    def url(self, direct: str) -> str:
        """The page's, without a slash at its end; `direct` is the gateway's."""
        return direct if self.front is None else f"{self.front.origin}{self.front.path}"

    def of_host(self, host: str) -> tuple[Place, ...]:
        """Where a browser may see the page of a request with this Host. Raises DeniedError for a page of a name that
        was made to point here."""
        if self.front is not None and host in (self.front.host, f"{self.front.host}:{_port(self.front.origin)}"):
            return (self.front,)
        if _port(f"//{host}") is None or not self.hosts(host_of(f"//{host}")):
            raise DeniedError(
                "the header Host does not name this gateway: use the gateway's own address",
                field="host",
                reason="FOREIGN_HOST",
            )
        direct = Place(f"{'https' if self.secure else 'http'}://{host}")
        return (direct,) if self.front is None else (direct, self.front)

    def of_origin(self, host: str, origin: str | None) -> Place:
        """Where the page is that sent a request. Raises DeniedError for another page than the dashboard's, which has
        the browser send it; other ports are other pages."""
        for place in self.of_host(host):
            if place.origin == origin:
                return place
        raise DeniedError(
            "the header Origin does not name the dashboard: open the dashboard itself",
            field="origin",
            reason="FOREIGN_ORIGIN",
        )


def parse_place(text: str) -> Place:
    """The place of a URL such as https://edge.example/edge/. Raises InvalidArgumentError for one that is none, and
    DeniedError for plain HTTP beyond loopback, where a cookie could be read on its way."""
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
            f"--dashboard-url {text[:200]!r} is plain HTTP beyond loopback, where others could read the "
            "cookie: use TLS at the proxy, and an https URL",
            field="dashboard-url",
            reason="TLS_REQUIRED",
        )
    shown = f"[{host}]" if ":" in host else host
    return Place(f"{parts.scheme}://{shown}{'' if port in (None, _PORTS[parts.scheme]) else f':{port}'}", path)


def _refused(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"--dashboard-url {text[:200]!r}: give scheme and host, and optionally port and path, such as "
        "https://edge.example or https://example.com:8443/edge; a path contains letters, digits and "
        "._~-",
        field="dashboard-url",
    )


def _port(url: str) -> int | None:
    """The port of a URL, that of its scheme where it names none, 0 without a scheme; None where it is no number."""
    try:
        parts = urlsplit(url)
        return _PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError:
        return None
