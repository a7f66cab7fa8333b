"""Prompts are tokenised few at a time and in a fair order. A prompt that cannot fit, or whose
client has left, is not tokenised.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import pytest
from edgeshard_agent.engine.tokenising import LONG_BYTES, Tokenising
from edgeshard_agent.engine.tokenizer import Tokenizer

import edgeshard
from edgeshard.chat.lane import text_too_costly
from edgeshard.domain.errors import (
    CancelledRequestError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import PROMPT_LIMIT_BYTES, Generation
from edgeshard.domain.requests.head import StartRequest
from tests.support.tokenizers import write_tokenizer

pytestmark = pytest.mark.timing

LONG = "x" * (LONG_BYTES + 1)
LIMIT_S = 60


class GatedTokenizer:
    """Encodes a text when the test allows it, and reports the current one."""

    longest_token_bytes = 1 << 20
    special_tokens: ClassVar[dict[str, int]] = {}
    growth = 1.0

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def open(self, text: str) -> None:
        self._gates.setdefault(text, threading.Event()).set()

    def encode(self, text: str) -> list[int]:
        gate = self._gates.setdefault(text, threading.Event())
        self.begun.append(text)
        assert gate.wait(LIMIT_S)
        return [len(text)]

    def decode(self, ids: list[int]) -> str:
        return ""


class Rig:
    def __init__(self) -> None:
        self.tokenizer = GatedTokenizer()
        self.tokenising = Tokenising(self.tokenizer, 512)
        self.tasks: dict[str, asyncio.Task[list[int]]] = {}
        self.left: set[str] = set()

    async def ask(self, text: str, client: str = "", priority: int = 0) -> None:
        start = StartRequest(
            RequestId(text[:9]), Generation(text, 4, priority=priority), client=client
        )
        self.tasks[text] = asyncio.create_task(
            self.tokenising.prompt_tokens(start, lambda: text in self.left)
        )
        for _ in range(3):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 (threads have no event in common)
                await asyncio.sleep(0.001)

    async def begun(self, *texts: str) -> None:
        """These texts were begun; no other could be."""
        await self.until(lambda: len(self.tokenizer.begun) >= len(texts))
        assert sorted(self.tokenizer.begun) == sorted(texts)

    async def finish(self, text: str) -> None:
        self.tokenizer.open(text)
        async with asyncio.timeout(LIMIT_S):
            assert await self.tasks[text] == [len(text)]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    # The loop waits for its threads when it is closed.
    for text in rig.tasks:
        rig.tokenizer.open(text)


def long(name: str) -> str:
    return name + LONG


async def test_a_short_text_waits_for_no_long_one(rig: Rig) -> None:
    for number in range(5):
        await rig.ask(long(f"long{number}"))
    await rig.ask("short")
    await rig.begun(long("long0"), "short")
    await rig.finish("short")
    await rig.ask("short again")
    await rig.finish("short again")
    assert rig.tokenizer.begun == [long("long0"), "short", "short again"], "one long text at a time"
    await rig.finish(long("long0"))
    await rig.finish(long("long1"))


async def test_few_texts_are_tokenised_at_once(rig: Rig) -> None:
    for number in range(9):
        await rig.ask(f"text{number}")
    await rig.begun("text0", "text1")
    await rig.finish("text1")
    await rig.begun("text0", "text1", "text2")


async def test_whoever_has_left_is_not_tokenised(rig: Rig) -> None:
    texts = [long(f"gone{number}") for number in range(12)]
    for text in texts:
        await rig.ask(text, client="gone")
    await rig.ask(long("other"), client="other")
    await rig.begun(texts[0])
    rig.left.update(texts)
    rig.tokenizer.open(texts[0])  # it runs, and nothing stops it
    await rig.finish(long("other"))
    assert rig.tokenizer.begun == [texts[0], long("other")]
    for text in texts[1:]:
        with pytest.raises(CancelledRequestError):
            await rig.tasks[text]


async def test_clients_take_turns_and_the_urgent_goes_first(rig: Rig) -> None:
    for number in range(4):
        await rig.ask(long(f"a{number}"), client="a")
    await rig.ask(long("b0"), client="b")
    await rig.ask(long("urgent"), client="a", priority=1)
    for text in ("a0", "urgent", "b0", "a1", "a2"):
        await rig.finish(long(text))
    assert rig.tokenizer.begun[:5] == [long(text) for text in ("a0", "urgent", "b0", "a1", "a2")]


async def test_a_task_that_ends_leaves_its_place_in_the_queue_but_not_its_thread(rig: Rig) -> None:
    for name in ("first", "second", "third"):
        await rig.ask(long(name))
    await rig.begun(long("first"))
    for name in ("first", "second"):
        rig.tasks[long(name)].cancel()
        with pytest.raises(asyncio.CancelledError):
            await rig.tasks[long(name)]
    await rig.ask("short")
    await rig.finish("short")
    assert rig.tokenizer.begun == [long("first"), "short"], "the thread is still at the first"
    rig.tokenizer.open(long("first"))
    await rig.finish(long("third"))
    assert long("second") not in rig.tokenizer.begun


async def test_a_fault_is_the_answer_of_its_own_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(text: str) -> list[int]:
        raise InvalidArgumentError(text, field="prompt")

    monkeypatch.setattr(rig.tokenizer, "encode", encode)
    for number in range(5):
        await rig.ask(f"text{number}")
    for number in range(5):
        with pytest.raises(InvalidArgumentError, match=f"text{number}"):
            await rig.tasks[f"text{number}"]


# Texts that cannot fit


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(Path(edgeshard.__file__).parent / "demo_model" / "tokenizer.json")


def asked(prompt: str | tuple[int, ...], new_tokens: int = 4) -> StartRequest:
    return StartRequest(RequestId("r"), Generation(prompt, new_tokens))


class Uncalled:
    """A tokenizer that must not be called."""

    special_tokens: ClassVar[dict[str, int]] = {}

    def __init__(self, longest_token_bytes: int, growth: float = 1.0) -> None:
        self.longest_token_bytes = longest_token_bytes
        self.growth = growth

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a text that cannot fit was tokenised")

    def decode(self, ids: list[int]) -> str:
        raise AssertionError


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(demo: Tokenizer) -> None:
    prompts = Tokenising(Uncalled(demo.longest_token_bytes), 512)
    with pytest.raises(InvalidArgumentError) as refused:
        await prompts.prompt_tokens(asked("x" * PROMPT_LIMIT_BYTES), lambda: False)
    assert (refused.value.field, refused.value.reason) == ("prompt", "CONTEXT_EXCEEDED")
    with pytest.raises(InvalidArgumentError) as refused:
        unclipped = Generation("x", 512, clip_new_tokens=False)
        await prompts.prompt_tokens(StartRequest(RequestId("r"), unclipped), lambda: False)
    assert (refused.value.field, refused.value.reason) == ("max_new_tokens", "CONTEXT_EXCEEDED")


class Aside:
    """In place of the process for long texts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = False

    async def encode(self, text: str) -> list[int]:
        self.asked.append(text)
        if text.startswith("costly"):
            raise text_too_costly()
        return [7]

    async def close(self) -> None:
        self.closed = True


async def test_a_text_that_may_become_long_leaves_this_process() -> None:
    aside = Aside()
    prompts = Tokenising(Uncalled(1 << 20, growth=40.0), 512, aside)
    text = "x" * (LONG_BYTES // 40 + 1)
    assert await prompts.prompt_tokens(asked(text), lambda: False) == [7]
    with pytest.raises(InvalidArgumentError) as refused:
        await prompts.prompt_tokens(asked("costly" + text), lambda: False)
    assert (refused.value.field, refused.value.reason) == ("prompt", "TEXT_TOO_COSTLY")
    assert await prompts.prompt_tokens(asked(text), lambda: False) == [7], "the next one is served"
    with pytest.raises(AssertionError):
        await prompts.prompt_tokens(asked(text[1:]), lambda: False)
    assert aside.asked == [text, "costly" + text, text]
    await prompts.close()
    assert aside.closed


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (None, "01" * 60),
        ({"type": "NFKC"}, "\N{MATHEMATICAL BOLD DIGIT ZERO}\N{MATHEMATICAL BOLD DIGIT ONE}" * 60),
    ],
    ids=["as it is", "with letters of four bytes for one"],
)
async def test_no_text_that_fits_is_refused(tmp_path: Path, normalizer: object, text: str) -> None:
    """The second one has as many bytes as a text that fits can have."""
    prompts = Tokenising(
        Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json", normalizer=normalizer)), 64
    )
    assert await prompts.prompt_tokens(asked(text), lambda: False) == [3] * 60


async def test_a_prompt_is_neither_cut_nor_filled_up_as_in_training(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    filled = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "2",
    }
    tokenizer = Tokenizer.load(
        write_tokenizer(tmp_path / "tokenizer.json", truncation=cut, padding=filled)
    )
    assert tokenizer.encode("0000") == [0, 0, 0, 0]


async def test_a_text_that_becomes_more_tokens_than_a_message_holds_is_refused(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeshard.domain.requests.generation.PROMPT_LIMIT_TOKENS", 3)
    with pytest.raises(InvalidArgumentError) as refused:
        await Tokenising(demo, 512).prompt_tokens(
            asked("once upon a time there was"), lambda: False
        )
    assert (refused.value.field, refused.value.reason) == ("prompt", "PROMPT_TOO_LONG")


async def test_token_ids_need_no_tokenizer_and_a_text_does() -> None:
    prompts = Tokenising(None, 512)
    assert await prompts.prompt_tokens(asked((1, 2)), lambda: False) == [1, 2]
    with pytest.raises(FailedPreconditionError) as refused:
        await prompts.prompt_tokens(asked("text"), lambda: False)
    assert refused.value.reason == "NO_TOKENIZER"
