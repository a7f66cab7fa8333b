"""One view of the site for all viewers: whole first, then its differences, at most twice a second.

A difference is a merge patch (RFC 7396). Objects are merged key by key, and null removes a key; so
no object of a picture has a null for a value.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

Json = Mapping[str, Any]


def difference(before: Json, after: Json) -> dict[str, Any]:
    """The patch that turns `before` into `after`; {} if they are equal. Identical objects are not
    compared."""
    changed: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old_value = before.get(key)
        if value is old_value and key in before:
            continue
        if isinstance(value, Mapping) and isinstance(old_value, Mapping):
            if inner := difference(old_value, value):
                changed[key] = inner
        elif key not in before or value != old_value:
            changed[key] = value
    return changed


EVERY_S = 0.5
WHOLE, CHANGE = "picture", "change"


class Feed:
    """`make` returns the newest view; it is called only while there are viewers.

    A viewer who misses more than one difference gets one new view: nothing is kept for a viewer.
    """

    def __init__(self, make: Callable[[], dict[str, Any]], every_s: float = EVERY_S) -> None:
        self._make = make
        self._every_s = every_s
        self._picture: dict[str, Any] = {}
        self._whole = b""
        self._change = b""
        self._version = 0
        self._ticked = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self.viewers = 0

    async def follow(self) -> AsyncGenerator[tuple[str, bytes]]:
        """WHOLE or CHANGE with its JSON, for a viewer; ("", b"") if nothing changed."""
        self.viewers += 1
        try:
            if self._ticking is None:
                self._look()
                self._ticking = asyncio.create_task(self._tick())
            last_version = 0
            while True:
                if last_version != self._version:
                    kind = CHANGE if last_version and last_version + 1 == self._version else WHOLE
                    text = self._change if kind == CHANGE else self._encoded()
                    last_version = self._version
                    yield kind, text
                    continue
                await self._ticked.wait()
                if self._ticking.done():
                    self._ticking.result()  # raises what the newest picture failed at
                if last_version == self._version:
                    yield "", b""
        finally:
            self.viewers -= 1
            if not self.viewers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    async def _tick(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._every_s)
                self._look()
                self._wake()
        finally:
            self._wake()

    def _wake(self) -> None:
        self._ticked.set()
        self._ticked = asyncio.Event()

    def _look(self) -> None:
        picture = self._make()
        if change := difference(self._picture, picture):
            self._version += 1
            self._change, self._whole = _encode(change), b""
        self._picture = picture

    def _encoded(self) -> bytes:
        self._whole = self._whole or _encode(self._picture)
        return self._whole


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
