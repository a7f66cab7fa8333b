"""Long prompts get the tokens of a thread from their process, which no text outlives its limits
in."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.engine.long_texts import LEAST_BYTES, MOST_BYTES, LongTexts, text_memory_bytes
from edgeshard_agent.engine.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, UnavailableError
from edgeshard.domain.requests.generation import PROMPT_LIMIT_TOKENS
from tests.support.chat_models import DEMO_MODEL
from tests.support.tokenizers import PANICS, write_tokenizer

pytestmark = pytest.mark.timing

_ONE = {"SpecialToken": {"id": "1", "type_id": 0}}
_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
PARTS: dict[str, dict[str, Any]] = {
    "letters": {},
    "normalised": {"normalizer": {"type": "NFKC"}},
    "longer": {"normalizer": {"type": "Replace", "pattern": {"String": "0"}, "content": "0110"}},
    "in pieces": {"pre_tokenizer": {"type": "Whitespace"}},
    "with a token in front": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_ONE, _TEXT],
            "pair": [_TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"1": {"id": "1", "ids": [1], "tokens": ["1"]}},
        }
    },
    "panicking": PANICS["encode"],
}
"""Parts of tokenizers by their names; `demo` is the demo model's."""


@pytest.fixture(scope="module", params=["demo", *PARTS])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that returns the result for a text in this process, and in the other."""
    name, path = request.param, DEMO_MODEL / "tokenizer.json"
    if name != "demo":
        path = write_tokenizer(
            tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", **PARTS[name]
        )
    tokenizer, long_texts = Tokenizer.load(path), LongTexts(path, LEAST_BYTES)
    with asyncio.Runner() as runner:

        def ask(text: str) -> tuple[object, object]:
            return outcome(lambda: tokenizer.encode(text)), outcome(
                lambda: runner.run(long_texts.encode(text))
            )

        yield ask
        runner.run(long_texts.close())


def outcome(ask: Any) -> object:
    try:
        return ask()
    except EdgeShardError as error:
        return type(error), error.message, error.field, error.reason


texts = st.text(min_size=1, max_size=60) | st.text(
    "012 \N{MATHEMATICAL BOLD DIGIT ZERO}", min_size=1, max_size=2000
)


@settings(deadline=None, max_examples=60)
@given(text=texts)
def test_tokens_and_faults_are_those_of_a_thread(both: Any, text: str) -> None:
    here, there = both(text)
    assert here == there


def test_so_are_those_of_a_text_that_is_long(both: Any) -> None:
    here, there = both("01 2, once upon a time. " * 20_000)
    assert here == there


def test_what_is_no_text_is_refused_alike(both: Any) -> None:
    here, there = both("0\ud800")
    assert here == there and isinstance(here, tuple)


@pytest.fixture
async def demo() -> AsyncIterator[LongTexts]:
    long_texts = LongTexts(DEMO_MODEL / "tokenizer.json", LEAST_BYTES)
    yield long_texts
    await long_texts.close()


async def test_a_process_that_was_killed_has_a_follower(demo: LongTexts) -> None:
    before = await demo.encode("once")
    pid, process = demo._lane.pid, demo._lane._process
    assert pid is not None and process is not None
    os.kill(pid, signal.SIGKILL)
    await process.wait()
    assert await demo.encode("once") == before and demo._lane.pid != pid


async def test_the_process_begins_with_a_text_and_ends_at_the_end(demo: LongTexts) -> None:
    assert demo._lane.pid is None
    await demo.encode("once")
    pid = demo._lane.pid
    await demo.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(UnavailableError):
        await demo.encode("once")


@pytest.mark.parametrize(
    ("memory_bytes", "seconds"), [(64 << 20, 60.0), (MOST_BYTES, 0.02)], ids=["memory", "time"]
)
async def test_a_text_that_takes_too_much_is_refused_by_its_name(
    memory_bytes: int, seconds: float
) -> None:
    long_texts = LongTexts(DEMO_MODEL / "tokenizer.json", memory_bytes, seconds)
    with pytest.raises(InvalidArgumentError) as refused:
        await long_texts.encode("once upon a time " * (1 << 16))
    assert (refused.value.field, refused.value.reason) == ("prompt", "TEXT_TOO_COSTLY")
    assert "once upon" not in refused.value.message
    assert await long_texts.encode("once upon a time"), "the next one is served"
    await long_texts.close()


async def test_more_tokens_than_a_message_holds_stay_where_they_are(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", **PARTS["longer"])
    long_texts = LongTexts(path, MOST_BYTES)
    with pytest.raises(InvalidArgumentError) as refused:
        await long_texts.encode("0" * (PROMPT_LIMIT_TOKENS // 2))
    await long_texts.close()
    assert refused.value.reason == "PROMPT_TOO_LONG"


def test_a_text_has_a_quarter_of_the_node_within_limits() -> None:
    budgets = (64 << 20, 2 << 30, 64 << 30)
    assert [text_memory_bytes(budget) for budget in budgets] == [LEAST_BYTES, 512 << 20, MOST_BYTES]
