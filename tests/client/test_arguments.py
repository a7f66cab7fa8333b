"""Arguments of a wrong type are named by a typed error, and nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeshard.client import Chat, Client, Prompt, SyncClient
from edgeshard.client.batch import run_batch
from edgeshard.client.completion import Completion
from edgeshard.domain.errors import (
    EdgeShardError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)

ROOT = Path(__file__).parents[2]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": 7}, "model"),
    "prompt": ({"prompt": 7}, "prompt"),
    "no prompt": ({"prompt": None}, "prompt"),
    "tokens": ({"prompt": [1, "x"]}, "prompt"),
    "a negative token": ({"prompt": [-1]}, "prompt"),
    "bytes": ({"prompt": b"Once"}, "prompt"),
    "max_new_tokens": ({"max_new_tokens": "9"}, "max_new_tokens"),
    "a fraction of a token": ({"max_new_tokens": 1.5}, "max_new_tokens"),
    "a flag for a number": ({"max_new_tokens": True}, "max_new_tokens"),
    "temperature": ({"temperature": "hot"}, "temperature"),
    "ignore_eos": ({"ignore_eos": 1}, "ignore_eos"),
    "stop": ({"stop": 7}, "stop"),
    "stops": ({"stop": ["x", 7]}, "stop"),
    "stop_tokens": ({"stop_tokens": "2"}, "stop_tokens"),
    "large stop_tokens": ({"stop_tokens": [2**40]}, "stop_tokens"),
    "guide": ({"guide": "json"}, "guide"),
    "request_id": ({"request_id": 7}, "request_id"),
    "timeout_s": ({"timeout_s": "1"}, "timeout_s"),
    "an unknown option": ({"max_length": 9}, "max_length"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_an_argument_of_a_wrong_type_is_named_and_nothing_is_sent(
    site: Any, what: str
) -> None:
    changes, field = WRONG[what]
    arguments: dict[str, Any] = {"model": "tales", "prompt": "Once", **changes}
    async with Client(site.address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.complete(**arguments)
    assert caught.value.field == field and not site.requests


async def test_whole_numbers_and_lists_are_taken(site: Any) -> None:
    async with Client(site.address) as client:
        await client.complete(
            "tales", [1, 2], temperature=1, stop=["x"], stop_tokens=[3], timeout_s=60
        )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"messages": 7}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"content": b"x"}]}, "messages"),
        ({"messages": "x", "tools": "find"}, "tools"),
        ({"messages": "x", "tools": [7]}, "tools[0]"),
        ({"messages": "x", "variables": [7]}, "variables"),
        ({"messages": "x", "temperature": "hot"}, "temperature"),
        ({"messages": "x", "model": 7}, "model"),
    ],
)
def test_so_are_those_of_a_chat(site: Any, arguments: dict[str, Any], field: str) -> None:
    with SyncClient(site.address) as client, pytest.raises(InvalidArgumentError) as caught:
        client.complete_chat(**{"model": "tales", **arguments})
    assert caught.value.field == field


async def test_text_stream_gives_texts_and_nothing_else(site: Any) -> None:
    async with Client(site.address) as client:
        pieces = [piece async for piece in client.text_stream("tales", "Once")]
    assert pieces == ["Once", " upon", " a", " time", " é", "!"]
    with SyncClient(site.address) as sync:
        assert "".join(sync.text_stream("tales", "Once")) == "Once upon a time é!"


async def test_a_completion_is_one_short_line(site: Any) -> None:
    async with Client(site.address) as client:
        completion = await client.complete("tales", "Once")
    assert str(completion) == "Once upon a time é!"
    assert "Once upon a time é!" in repr(completion) and len(repr(completion)) < 200


def test_type_checkers_are_told_that_there_are_types() -> None:
    for package in ("edgeshard", "agent/edgeshard_agent", "coordinator/edgeshard_coordinator"):
        assert (ROOT / package / "py.typed").exists()


class Steps:
    """A clock that a test moves."""

    time = 0.0

    def now(self) -> float:
        return self.time


async def test_a_batch_offers_again_what_there_was_no_room_for_and_nothing_else() -> None:
    asked: list[str] = []

    async def run(request: Prompt | Chat) -> Completion:
        assert isinstance(request, Prompt)
        asked.append(str(request.prompt))
        if request.prompt == "room" and asked.count("room") < 3:
            raise ResourceExhaustedError("full", retry_after_s=0.01)
        raise (
            UnavailableError("gone")
            if request.prompt == "gone"
            else ResourceExhaustedError("for good")
        )

    results = await run_batch(run, [Prompt("m", "room"), Prompt("m", "gone")], 1, None, Steps())
    assert asked == ["room"] * 3 + ["gone"]
    assert [str(result) for result in results if isinstance(result, EdgeShardError)] == [
        "for good",
        "gone",
    ]


@pytest.mark.parametrize(
    ("requests", "concurrency", "field"), [([], 0, "concurrency"), (["x"], 1, "requests[0]")]
)
async def test_a_batch_names_what_is_wrong_with_it(
    requests: Any, concurrency: int, field: str
) -> None:
    async with Client("127.0.0.1:1", plaintext=True) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.batch(requests, concurrency)
    assert caught.value.field == field
