"""One key's long texts against the processes that render and tokenise for all."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.attack.raw import ask


async def long_texts(
    url: str, key: str, model: str, *, count: int = 12, size: int = 3 << 20
) -> Counter[int]:
    """`count` posts of a text of `size` bytes to /tokenize at the same time; how often each status
    came."""
    body = {"model": model, "prompt": ("once upon a time " * (size // 17 + 1))[:size]}
    return Counter(
        await asyncio.gather(*(ask(url, key, "/tokenize", body, 300.0) for _ in range(count)))
    )


async def long_variables(
    url: str, key: str, model: str, *, count: int = 4, size: int = 2 << 20
) -> Counter[int]:
    """`count` chats with `size` bytes of chat_template_kwargs; how often each status came."""
    variables = {f"v{number}": "x" * 1000 for number in range(size // 1000)}
    messages = [{"role": "user", "content": "x"}]
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 1,
        "chat_template_kwargs": variables,
    }
    posts = (ask(url, key, "/v1/chat/completions", body, 300.0) for _ in range(count))
    return Counter(await asyncio.gather(*posts))
