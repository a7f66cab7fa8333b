"""The first message of a stream, which names its sender. A stream without it would stay open for
ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from edgeshard.domain.errors import DeadlineError

HELLO_TIMEOUT_S = 5.0

MessageT = TypeVar("MessageT")


async def first_message(
    messages: AsyncIterator[MessageT], field: str, stream: str
) -> MessageT | None:
    """The first message; None if the stream ended before it.

    Raises DeadlineError naming `field` after HELLO_TIMEOUT_S. `stream` names the stream in words.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(messages), None)
    except TimeoutError:
        raise DeadlineError(
            f"{field}: {stream} must begin with it, and it did not arrive within "
            f"{HELLO_TIMEOUT_S:g} s; "
            "send it when the stream opens",
            field=field,
            reason="NO_HELLO",
        ) from None
