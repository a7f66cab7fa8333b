"""The memory of bodies while they are read, and how large ones are parsed."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from typing import Any

import pytest

from edgeshard.domain.errors import (
    EdgeShardError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.gateway.access import bodies
from edgeshard.gateway.access.bodies import KEYED, STRANGER, Bodies, BodyBudget, PartCounter
from edgeshard.gateway.routes.texts import TokenizeRequest

MIB = 1 << 20


def test_one_identity_has_a_part_of_it_and_all_have_no_more_than_there_is() -> None:
    budget = BodyBudget(most=64 * MIB, most_of_one=32 * MIB)
    budget.take("key/a", 32 * MIB)
    with pytest.raises(ResourceExhaustedError) as own:
        budget.take("key/a", 1)
    assert own.value.retry_after_s and own.value.field == "body"
    budget.take("key/b", 32 * MIB)
    with pytest.raises(UnavailableError) as all_together:
        budget.take("key/c", 2 * MIB)
    assert all_together.value.retry_after_s
    budget.take("key/c", MIB)  # so that no caller is blocked
    budget.give_back("key/a", 32 * MIB)
    budget.take("key/c", 2 * MIB)


def test_without_keys_everyone_together_has_all_of_it() -> None:
    budget = BodyBudget(most=64 * MIB, most_of_one=32 * MIB)
    budget.take("", 64 * MIB)
    with pytest.raises(ResourceExhaustedError):
        budget.take("", 1)


def test_random_bodies_never_hold_more_than_there_is() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        budget = BodyBudget(most=8 * MIB, most_of_one=3 * MIB)
        held: list[tuple[str, int]] = []
        for _ in range(200):
            if held and chance.random() < 0.4:
                budget.give_back(*held.pop(chance.randrange(len(held))))
            else:
                taking = chance.choice(["a", "b", "c", "d"]), chance.randrange(1, 2 * MIB)
                try:
                    budget.take(*taking)
                except EdgeShardError:
                    continue
                held.append(taking)
            assert (
                budget.total == sum(size for _, size in held) <= 8 * MIB + 4 * bodies.ALWAYS_BYTES
            )
            assert all(sum(size for who, size in held if who == name) <= 3 * MIB for name in "abcd")
        for one in held:
            budget.give_back(*one)
        assert budget == BodyBudget(most=8 * MIB, most_of_one=3 * MIB)


def test_a_body_must_come_at_a_rate_and_in_time() -> None:
    assert KEYED.patience_s(0) == bodies.GRACE_S
    assert KEYED.patience_s(bodies.LEAST_BPS) == bodies.GRACE_S + 1
    assert KEYED.patience_s(bodies.MOST_BODY_BYTES) == bodies.BODY_LIMIT_S
    assert STRANGER.patience_s(STRANGER.max_bytes) == bodies.GRACE_S


def counted(text: bytes, size: int) -> tuple[int, int]:
    """The parts and items of a text that arrives in pieces of `size` bytes."""
    counter = PartCounter()
    for start in range(0, len(text), size):
        counter.feed(text[start : start + size])
    counter.check()
    return counter.parts, counter.items


TRICKY: list[Any] = [
    {"a": 1, "b": [1, 2, {"c": None}]},
    {'a,{[:"': 'x,{[:"\\', "\\": ["\\\\", '\\"', '\\"', ",\\"]},
    ["", "\\", '"', "NaN", "Infinity", "\u0000", "\n\\\n"],
    [[[], {}], [{"": {"": ""}}], "日本,[{"],
]


def structure(value: Any) -> tuple[int, int]:
    """The parts and items of a value: lists, objects and fields, and what stands between two
    members."""
    if isinstance(value, dict):
        inner = [structure(part) for part in value.values()]
        return 1 + len(value) + sum(parts for parts, _ in inner), max(0, len(value) - 1) + sum(
            n for _, n in inner
        )
    if isinstance(value, list):
        inner = [structure(part) for part in value]
        return 1 + sum(parts for parts, _ in inner), max(0, len(value) - 1) + sum(
            n for _, n in inner
        )
    return 0, 0


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("value", TRICKY)
def test_what_texts_hold_is_not_counted_wherever_a_body_is_cut(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    for size in range(1, len(text) + 1):
        assert counted(text, size) == structure(value)


@pytest.mark.parametrize("text", [b'{"x": NaN}', b"[-Infinity]", b'["\\\\", NaN]'])
def test_a_number_that_json_lacks_is_refused(text: bytes) -> None:
    for size in (1, 2, len(text)):
        with pytest.raises(InvalidArgumentError, match="NaN"):
            counted(text, size)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * bodies.MOST_PARTS,
        b'{"a" :1' + b',"b" :2' * bodies.MOST_PARTS,
        b"[0" + b",0" * (1 << 19),
    ],
    ids=["lists", "fields with a space", "numbers"],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(text: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        counted(text, 65536)
    assert (refused.value.field, refused.value.reason) == ("body", "TOO_MANY_PARTS")


def test_a_place_is_counted_while_its_body_is_read() -> None:
    held, seen = Bodies(), []

    def check(identity: str, reading: int) -> None:
        seen.append(reading)
        if reading >= 2:
            raise ResourceExhaustedError("too many")

    with held.place("key/a", check), held.place("key/a", check), held.place("key/b", check):
        with pytest.raises(ResourceExhaustedError), held.place("key/a", check):
            pass
        assert (held.reading("key/a"), held.reading("key/b")) == (2, 1)
    assert seen == [0, 1, 0, 2] and held.reading("key/a") == 0


def test_room_grows_with_a_body_that_does_not_say_its_length() -> None:
    held = Bodies()
    with held.room("key/a", 0) as grow:
        assert held.held_bytes == bodies.LEAST_BYTES
        for size in range(0, 3 * MIB, 50_000):
            grow(size)
            assert size <= held.held_bytes <= size + 2 * bodies.LEAST_BYTES
        with pytest.raises(ResourceExhaustedError):
            grow(33 * MIB)
    assert held.held_bytes == 0


async def test_the_event_loop_has_its_time_between_two_large_bodies() -> None:
    """Eight large bodies at once: other things run between any two, and another identity's comes
    next."""
    held = Bodies()
    large = bytearray(json.dumps({"model": "m", "prompt": "x" * (4 * bodies.LARGE_BYTES)}).encode())
    small = bytearray(b'{"model": "m", "prompt": "y"}')
    order: list[str] = []

    async def parse(identity: str, body: bytearray) -> None:
        await held.parsed(identity, body, TokenizeRequest)
        order.append(identity)

    tasks = [asyncio.create_task(parse("key/flood", large)) for _ in range(8)]
    await asyncio.sleep(0)
    tasks += [
        asyncio.create_task(parse("key/honest", large)),
        asyncio.create_task(parse("key/small", small)),
    ]
    await asyncio.gather(*tasks)
    assert order.index("key/small") <= 1 and order.index("key/honest") <= 3, order


async def test_a_large_body_that_is_refused_says_why() -> None:
    body = bytearray(
        json.dumps({"model": "m", "prompt": 7, "x": "x" * bodies.LARGE_BYTES}).encode()
    )
    with pytest.raises(InvalidArgumentError):
        await Bodies().parsed("key/a", body, TokenizeRequest)


async def test_whoever_leaves_is_parsed_for_no_more() -> None:
    held = Bodies()
    large = bytearray(json.dumps({"model": "m", "prompt": "x" * (2 * bodies.LARGE_BYTES)}).encode())
    first, second = (
        asyncio.create_task(held.parsed("key/a", large, TokenizeRequest)) for _ in range(2)
    )
    await asyncio.sleep(0)
    second.cancel()
    assert (await first).model == "m"
    assert (await held.parsed("key/b", large, TokenizeRequest)).model == "m"
    assert len(held._turns) == 0


async def test_a_large_body_that_is_refused_leaves_no_memory() -> None:
    messages = [{"role": "user", "content": "y" * 60}] * 8000
    body = bytearray(json.dumps({"model": "m", "prompt": "x", "messages": messages}).encode())

    async def blocks() -> int:
        for _ in range(3):
            with pytest.raises(InvalidArgumentError):
                await Bodies().parsed("key/a", body, TokenizeRequest)
        gc.collect()
        return sys.getallocatedblocks()

    before = await blocks()
    assert await blocks() - before < 8000
