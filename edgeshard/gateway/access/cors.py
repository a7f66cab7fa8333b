"""Pages that may use the gateway from a browser: cross-origin resource sharing (CORS)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from edgeshard.domain.errors import InvalidArgumentError

Headers = Mapping[str, str]
"""The headers of a request, by names in lower case."""

ANY = "*"
EXPOSED = "x-request-id, retry-after, retry-after-ms, x-should-retry, x-ignored-tools"
"""The headers of answers that a page may read."""
_ALWAYS = ("authorization", "content-type")
_NAMES = re.compile(r"[A-Za-z0-9-]{1,64}( *, *[A-Za-z0-9-]{1,64}){0,63}")
_PREFLIGHT_S = 600


class Origins:
    """The origins of pages that may read answers, such as `https://chat.example`, or `*` for all.

    Pages never get leave to send cookies or the like: each needs a key of its own, in Authorization
    or x-api-key.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    @property
    def any(self) -> bool:
        """Whether all pages may."""
        return ANY in self._allowed

    def allows(self, headers: Headers) -> bool:
        """Whether the request is from such a page."""
        origin = headers.get("origin")
        return origin is not None and (self.any or origin in self._allowed)

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Whether a browser requests the rights of such a page."""
        return (
            method == "OPTIONS"
            and "access-control-request-method" in headers
            and self.allows(headers)
        )

    def headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The headers of the answer to a request with these headers."""
        if not self._allowed:
            return []
        # A cache must not hand one page what another may read.
        vary = [] if self.any else [(b"vary", b"Origin")]
        if not self.allows(headers):
            return vary
        allowed = ANY if self.any else headers["origin"]
        return [
            *vary,
            (b"access-control-allow-origin", allowed.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED.encode()),
        ]

    def preflight(self, headers: Headers) -> dict[str, str]:
        """The headers of the answer to a preflight. A page may send any header; unknown ones have
        no effect."""
        header_list = headers.get("access-control-request-headers", "")
        named = (
            [name.strip().lower() for name in header_list.split(",")]
            if _NAMES.fullmatch(header_list.strip())
            else []
        )
        return {
            "access-control-allow-methods": "GET, HEAD, POST",
            "access-control-allow-headers": ", ".join(dict.fromkeys((*_ALWAYS, *named))),
            "access-control-max-age": str(_PREFLIGHT_S),
        }


NOBODY = Origins()


def parse_origins(texts: Iterable[str]) -> Origins:
    """The origins in these texts. Raises InvalidArgumentError for one that no browser sends: it
    would not match."""
    origins = tuple(texts)
    for text in origins:
        if text != ANY and not _is_origin(text):
            raise InvalidArgumentError(
                f"--http-allow-origin {text[:80]!r}: give scheme, host and port as a browser does, "
                "such as "
                "https://chat.example or http://localhost:3000, without a path; or * for all pages",
                field="http-allow-origin",
            )
    return Origins(origins)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return False
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return bool(host) and bool(parts.scheme) and text == f"{parts.scheme}://{host}{port}"
