"""Headers that a route adds to its answer, also to one that begins before the route has returned."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

_STATE = "answer_headers"


def add_header(request: Request, name: str, value: str) -> None:
    """Have the answer to a request carry a header, whichever response it is."""
    request.scope["state"].setdefault(_STATE, []).append((name.encode("latin-1"), value.encode("latin-1")))


def added_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers that were added for the answer to a request."""
    headers: list[tuple[bytes, bytes]] = scope["state"].get(_STATE, [])
    return headers
