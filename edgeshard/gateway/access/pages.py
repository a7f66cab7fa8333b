"""Pages for people, separate from the routes for programs, with rights of their own."""

from __future__ import annotations

from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send


class Pages(Protocol):
    """An app of its own on the gateway's port. It checks Host and Origin by itself, and no other origin may read its
    answers."""

    api: ASGIApp | None
    """The gateway's routes with the check of keys, once they are made."""

    def takes(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request is for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...
