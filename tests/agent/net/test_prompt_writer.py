"""Writes that begin at once, one after the other, and their outcome if one fails or the stream
ends."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from edgeshard_agent.net.prompt_writer import PromptWriter, Write


class Line:
    """A stream whose writes end when the test ends them."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.failures: list[BaseException] = []
        self.futures: deque[asyncio.Future[None]] = deque()
        self.writer = PromptWriter(self.next_write, self.failures.append)

    def next_write(self) -> Write | None:
        return self.write(self.waiting.popleft()) if self.waiting else None

    async def write(self, number: int) -> None:
        self.begun.append(number)
        if number < 0:
            raise ValueError(str(number))
        if number:
            self.futures.append(asyncio.get_running_loop().create_future())
            await self.futures[-1]
            await asyncio.sleep(0)
        self.ended.append(number)

    def put(self, *numbers: int) -> None:
        self.waiting.extend(numbers)
        self.writer.poke()

    async def let(self) -> None:
        self.futures.popleft().set_result(None)
        for _ in range(4):
            await asyncio.sleep(0)


async def test_the_first_write_is_under_way_when_poke_returns_and_the_others_follow_in_order() -> (
    None
):
    line = Line()
    line.put(1)
    assert (line.begun, line.ended) == ([1], [])
    line.put(2, 3)
    assert line.begun == [1], "one at a time"
    await line.let()
    assert (line.begun, line.ended) == ([1, 2], [1])
    await line.let()
    await line.let()
    assert (line.begun, line.ended, line.failures) == ([1, 2, 3], [1, 2, 3], [])
    line.put(4)
    assert line.begun == [1, 2, 3, 4], "idle again"


async def test_writes_that_wait_for_nothing_end_before_poke_returns() -> None:
    line = Line()
    line.put(0, 0, 0)
    assert line.ended == [0, 0, 0]


@pytest.mark.parametrize("first", [[], [1]], ids=["at once", "behind another"])
async def test_behind_a_write_that_fails_nothing_is_written(first: list[int]) -> None:
    line = Line()
    line.put(*first, -1, 5)
    if first:
        await line.let()
    line.put(6)
    assert line.begun == [*first, -1] and [str(error) for error in line.failures] == ["-1"]


async def test_the_error_that_a_write_waited_for_is_its_own() -> None:
    line = Line()
    line.put(1, 2)
    line.futures.popleft().set_exception(ConnectionError("gone"))
    await asyncio.sleep(0)
    assert line.begun == [1] and [str(error) for error in line.failures] == ["gone"]


async def test_after_its_end_a_write_under_way_is_dropped_and_none_begins() -> None:
    line = Line()
    line.put(1, 2)
    line.writer.close()
    await line.let()
    line.put(3)
    assert (line.begun, line.ended, line.failures) == ([1], [], [])
