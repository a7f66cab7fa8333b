"""One snapshot for all viewers: differences lead to it, and a slow viewer gets it whole."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest
from edgeshard_coordinator.dashboard.feed import CHANGE, WHOLE, Feed, difference
from hypothesis import given
from hypothesis import strategies as st

from tests.support.patches import patched

EVERY_S = 0.02
VALUES = st.recursive(
    st.one_of(
        st.integers(-2, 2), st.text("ab", max_size=2), st.lists(st.integers(0, 2), max_size=2)
    ),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), VALUES, max_size=4)


@given(OBJECTS, OBJECTS)
def test_a_difference_makes_the_newer_of_the_older(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert patched(before, difference(before, after)) == after
    assert (difference(before, after) == {}) == (before == after)


async def test_no_event_has_what_json_has_not() -> None:
    async with aclosing(Feed(lambda: {"load": float("nan")}, EVERY_S).follow()) as told:
        with pytest.raises(ValueError, match="JSON"):
            await anext(told)


async def test_viewers_follow_and_one_who_falls_behind_gets_a_new_picture() -> None:
    made = iter(range(10**6))
    feed = Feed(lambda: {"number": next(made), "still": {"a": 1}}, EVERY_S)
    quick: list[tuple[str, dict[str, Any]]] = []
    async with aclosing(feed.follow()) as slow:
        kind, text = await anext(slow)
        assert (kind, json.loads(text)) == (WHOLE, {"number": 0, "still": {"a": 1}})
        async with aclosing(feed.follow()) as told:
            async for kind, text in told:
                quick.append((kind, json.loads(text)))
                if len(quick) == 4:
                    break
        kind, text = await anext(slow)
        assert kind == WHOLE and json.loads(text)["number"] >= 3, "nothing was kept for it"
    assert quick[0][0] == WHOLE and "still" in quick[0][1]
    assert quick[1:] == [(CHANGE, {"number": quick[0][1]["number"] + later}) for later in (1, 2, 3)]


async def test_a_picture_that_fails_ends_the_streams() -> None:
    pictures: list[dict[str, Any]] = [{"a": 1}]
    feed = Feed(pictures.pop, EVERY_S)
    async with aclosing(feed.follow()) as told:
        await anext(told)
        with pytest.raises(IndexError):
            await asyncio.wait_for(anext(told), 10)
    pictures.append({"a": 2})
    async with aclosing(feed.follow()) as told:
        assert await anext(told) == (WHOLE, b'{"a":2}')


async def test_without_viewers_nothing_is_made() -> None:
    made = []
    feed = Feed(lambda: {"number": len(made.append(1) or made)}, EVERY_S)  # type: ignore[func-returns-value]
    for _ in range(2):
        async with aclosing(feed.follow()) as told:
            assert [(await anext(told))[0] for _ in range(2)] == [WHOLE, CHANGE]
        count = len(made)
        await asyncio.sleep(3 * EVERY_S)
        assert (len(made), feed.viewers) == (count, 0)


async def test_a_viewer_who_comes_back_sees_what_is_there_now() -> None:
    value = {"a": 1}
    feed = Feed(lambda: dict(value), EVERY_S)
    for expected in (1, 2, 2):
        async with aclosing(feed.follow()) as told:
            kind, text = await anext(told)
            assert (kind, json.loads(text)) == (WHOLE, {"a": expected})
        value["a"] = 2
