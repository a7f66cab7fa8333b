"""One key's long texts compete with another key's chat. The order of answers is compared, not
seconds."""

from __future__ import annotations

import asyncio

import pytest

from tests.attack import tokenize
from tests.attack.raw import ask, beside
from tests.support.http import Http

pytestmark = pytest.mark.timing

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
PATH = "/v1/chat/completions"


async def test_long_texts_of_one_key_do_not_delay_anothers_chat(http: Http) -> None:
    """The other's chat continues while they are tokenised, and waits for none of them."""
    assert (await http.post(PATH, CHAT)).status == 200
    async with beside(http, PATH, CHAT) as took:
        assert await tokenize.long_texts(http.url, "mallory", "m", count=6, size=1 << 20) == {
            200: 6
        }
    assert len(took) >= 6, "it waited for them"


async def test_texts_of_one_key_take_turns_with_anothers_chat(http: Http) -> None:
    """A chat that arrives after 24 texts as short as itself is answered before most of them."""
    order: list[str] = []
    first = asyncio.Event()
    body = {"model": "m", "prompt": "once upon a time " * 3500}

    async def text() -> None:
        assert await ask(http.url, "mallory", "/tokenize", body) == 200
        order.append("text")
        first.set()

    texts = [asyncio.create_task(text()) for _ in range(24)]
    await first.wait()
    assert (await http.post(PATH, CHAT)).status == 200
    order.append("chat")
    await asyncio.gather(*texts)
    assert order.index("chat") <= 12, order


async def test_long_variables_are_refused_by_their_name(http: Http) -> None:
    assert await tokenize.long_variables(http.url, "mallory", "m") == {400: 4}
    answer = await http.post(PATH, {**CHAT, "chat_template_kwargs": {"x": "y" * (64 << 10)}})
    assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
