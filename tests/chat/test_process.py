"""Templates of strangers end in time, and the next caller is served."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from edgeshard.chat import lane
from edgeshard.chat.template_process import ChatProcess, ModelFiles
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedModelError,
)
from edgeshard.domain.ids import Digest
from edgeshard.domain.requests.conversation import Conversation
from tests.attack import tokenizer_growth
from tests.support.tokenizers import write_tokenizer

pytestmark = [pytest.mark.timing, pytest.mark.asyncio(loop_scope="module")]

DEMO = Path(__file__).parents[2] / "edgeshard" / "demo_model"
HELLO = Conversation(json.dumps([{"role": "user", "content": "Once upon a time"}]))
GOOD = "{{ messages[0].content }}"
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}"
    + ("{% endfor %}{% endfor %}")
)
REASONS = {"TEMPLATE_EXHAUSTED", "BAD_TEMPLATE", "PROMPT_TOO_LONG"}
HOSTILE = {
    "a long range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": ENDLESS,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a long string": "{{ 'x' * 10**11 }}",
    "a string doubled": (
        "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% "
        "endfor %}"
    ),
    "a constant power, which Jinja computes while it compiles": "{{ 7 ** (7 ** 10) }}",
    "a power": "{% set n = messages | length + 6 %}{{ n ** (n ** 10) }}",
    "padding": "{{ '%99999999999d' % 1 }}",
    "a filter's padding": "{{ 'x' | center(10**11) }}",
    "a list": "{{ [0] * 10**11 }}",
    "much text": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "replacing": "{{ ('x' * 99999).replace('x', 'x' * 99999).replace('x', 'x' * 99999) }}",
}


def files_of(folder: Path, template: str) -> ModelFiles:
    digest = hashlib.sha256(template.encode()).hexdigest()
    path = folder / digest
    path.write_text(template, encoding="utf-8")
    return ModelFiles(
        Digest(digest), {"tokenizer.json": DEMO / "tokenizer.json", "chat_template.jinja": path}
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chats() -> AsyncIterator[ChatProcess]:
    asked = ChatProcess()
    yield asked
    await asked.close()


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_template_ends_and_the_next_one_is_served(
    chats: ChatProcess, tmp_path: Path, what: str
) -> None:
    await chats.tokenize(files_of(tmp_path, GOOD), "x")  # so that the process is there
    before = os.times()
    with pytest.raises(EdgeShardError) as caught:
        await chats.prompt(files_of(tmp_path, HOSTILE[what]), HELLO)
    used = os.times()
    assert caught.value.reason in REASONS
    assert (
        used.children_user + used.children_system - before.children_user - before.children_system
        < 2.0
    )
    prompt = await chats.prompt(files_of(tmp_path, GOOD), HELLO)
    assert await chats.detokenize(files_of(tmp_path, GOOD), prompt.tokens) == "Once upon a time"


async def test_nobody_stands_still_while_a_template_runs(
    chats: ChatProcess, tmp_path: Path
) -> None:
    endless = asyncio.create_task(chats.prompt(files_of(tmp_path, ENDLESS), HELLO))
    turns = 0
    while not endless.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100 and isinstance(endless.exception(), EdgeShardError)


async def test_who_leaves_before_the_answer_leaves_it_to_nobody(
    chats: ChatProcess, tmp_path: Path
) -> None:
    files = files_of(tmp_path, GOOD)
    left = asyncio.create_task(chats.tokenize(files, "one"))
    await asyncio.sleep(0)
    left.cancel()
    assert await chats.detokenize(files, await chats.tokenize(files, "two")) == "two"


async def test_who_leaves_before_its_turn_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    start = lane._start

    async def counted(module: str, niceness: int) -> asyncio.subprocess.Process:
        started.append(None)
        return await start(module, niceness)

    monkeypatch.setattr(lane, "_start", counted)
    monkeypatch.setattr(lane, "MOST_WAITING", 5)
    chats = ChatProcess()
    endless = files_of(tmp_path, ENDLESS)
    first, *others = (asyncio.create_task(chats.prompt(endless, HELLO)) for _ in range(6))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError):
        await chats.tokenize(endless, "one too many")
    for task in others:
        task.cancel()
    with pytest.raises(UnsupportedModelError):
        await first
    assert await chats.tokenize(files_of(tmp_path, GOOD), "x")
    assert len(started) == 2, "each of the others would have ended a process"
    await chats.close()


async def test_ids_that_the_model_has_not_are_refused(chats: ChatProcess, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await chats.detokenize(files_of(tmp_path, GOOD), [4096])
    assert caught.value.field == "tokens"


async def test_closing_ends_the_process_and_what_waits_for_it(tmp_path: Path) -> None:
    chats = ChatProcess()
    endless = asyncio.create_task(chats.prompt(files_of(tmp_path, ENDLESS), HELLO))
    deadline = time.monotonic() + 30
    while chats.pid is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    pid = chats.pid
    await chats.close()
    with pytest.raises(UnavailableError):
        await endless
    assert not Path(f"/proc/{pid}").exists()


LONG = "word " * 40_000


async def test_a_short_text_does_not_wait_for_long_ones(chats: ChatProcess, tmp_path: Path) -> None:
    """One key's long texts, and another's short one: counted in answers, not in seconds."""
    files = files_of(tmp_path, GOOD)
    # so that both processes are there
    await asyncio.gather(chats.tokenize(files, "x"), chats.tokenize(files, LONG))
    order: list[str] = []

    async def ask(who: str, text: str) -> None:
        await chats.tokenize(files, text, identity=who)
        order.append(who)

    flood = [asyncio.create_task(ask("key/flood", LONG * 4)) for _ in range(12)]
    await asyncio.sleep(0)
    await ask("key/honest", "one word")
    assert order[0] == "key/honest", "it waited for a long text"
    await ask("key/other", LONG)
    assert order.count("key/flood") <= 2, "it waited for more than the text that ran"
    await asyncio.gather(*flood)


@pytest.mark.long
async def test_a_text_of_which_the_tokenizer_makes_too_much_is_refused(
    chats: ChatProcess, tmp_path: Path
) -> None:
    """Six doublings of a megabyte want 8 GB of memory."""
    path = write_tokenizer(tmp_path / "tokenizer.json", **tokenizer_growth.chains(6)["replaced"])
    grows = ModelFiles(Digest("6" * 64), {"tokenizer.json": path})
    with pytest.raises(InvalidArgumentError) as caught:
        await chats.tokenize(grows, "0" * (1 << 20))
    assert (caught.value.field, caught.value.reason) == ("prompt", "TEXT_TOO_COSTLY")
    assert await chats.tokenize(grows, "1") == (1,), "the next one is served"


async def test_what_certainly_exceeds_the_context_is_never_begun(
    chats: ChatProcess, tmp_path: Path
) -> None:
    small = replace(files_of(tmp_path, GOOD), max_context=16)
    for asked in (
        chats.tokenize(small, LONG),
        chats.prompt(small, Conversation(json.dumps([{"role": "user", "content": LONG}]))),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await asked
        assert caught.value.reason == "CONTEXT_EXCEEDED"
    assert caught.value.field == "messages"
    assert await chats.tokenize(small, "one"), "what may fit is tokenised"


async def test_a_long_variable_is_refused_before_anybody_renders_it(tmp_path: Path) -> None:
    chats = ChatProcess()
    variables = json.dumps({"x": "y" * (64 << 10)})
    with pytest.raises(InvalidArgumentError) as caught:
        await chats.prompt(
            files_of(tmp_path, GOOD), Conversation(HELLO.messages, variables=variables)
        )
    assert caught.value.field == "variables" and chats.pid is None


async def test_a_vocabulary_is_what_ids_mean_and_not_how_it_is_written(
    chats: ChatProcess, tmp_path: Path
) -> None:
    ways: dict[str, dict[str, object]] = {
        "plain": {},
        "another order": {"model": bpe({"01": 3, "2": 2, "1": 1, "0": 0})},
        "other ids": {"model": bpe({"0": 1, "1": 0, "2": 2, "01": 3})},
        "one more": {"added_tokens": [added_token("<s>", 4)]},
    }
    found = {}
    for number, (name, parts) in enumerate(ways.items()):
        path = write_tokenizer(tmp_path / f"{number}.json", **parts)
        found[name] = await chats.vocabulary(
            ModelFiles(Digest(f"{number:064}"), {"tokenizer.json": path})
        )
    assert found["plain"] == found["another order"]
    assert len(set(found.values())) == 3
    with pytest.raises(FailedPreconditionError):
        await chats.vocabulary(ModelFiles(Digest("f" * 64), {}))


def bpe(vocab: dict[str, int]) -> dict[str, object]:
    return {"type": "BPE", "vocab": vocab, "merges": [["0", "1"]]}


def added_token(text: str, number: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **flags}
