"""The first message of a stream, which says who it is. It must come soon: a stream without it would stay for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from edgeshard.domain.errors import DeadlineError

HELLO_TIMEOUT_S = 5.0

MessageT = TypeVar("MessageT")


async def first_message(messages: AsyncIterator[MessageT], field: str, stream: str) -> MessageT | None:
    """None for a stream that ended before it. Raises DeadlineError naming `field`; `stream` is what it is, in words."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(messages), None)
    except TimeoutError:
        raise DeadlineError(
            f"{field}: {stream} begins with it, and it did not come within {HELLO_TIMEOUT_S:g} s; "
            "send it as soon as the stream is open",
            field=field,
            reason="NO_HELLO",
        ) from None
