"""Streamed text with the demo model's own tokenizer, whose rare characters are single bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.scheduler.text import TextStream

import edgeshard


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(edgeshard.__file__).parent / "demo_model" / "tokenizer.json")


def streamed(
    tokenizer: Tokenizer, prompt: str, new: str, cut: int = 0, stop: tuple[str, ...] = ()
) -> str:
    before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + new)
    assert whole[: len(before)] == before, "the prompt's tokens must not depend on what follows"
    stream, text = TextStream(tokenizer.decode, before, stop), ""
    for token in whole[len(before) : len(whole) - cut]:
        text += stream.push(token)
        if stream.stopped:
            break
    return text + stream.finish()


@pytest.mark.parametrize(
    "prompt",
    ["x", "ab \N{EURO SIGN}", "\N{GRINNING FACE}" * 2, "\N{GRINNING FACE}" * 5, "日本" * 3],
)
@pytest.mark.parametrize("new", ["\N{GRINNING FACE}x cat", "\N{EURO SIGN}" * 3, "日本 x"])
def test_characters_of_bytes_survive_after_a_prompt_of_such(
    tokenizer: Tokenizer, prompt: str, new: str
) -> None:
    assert streamed(tokenizer, prompt, new) == new


@pytest.mark.parametrize("cut", [1, 2])
def test_an_unfinished_character_at_the_end_spoils_only_itself(
    tokenizer: Tokenizer, cut: int
) -> None:
    text = streamed(tokenizer, "x", "a\N{EURO SIGN}\N{EURO SIGN}", cut)
    assert text.startswith("a\N{EURO SIGN}") and set(text[2:]) == {"\N{REPLACEMENT CHARACTER}"}
    assert len(text) - 2 <= 3 - cut


def test_bytes_that_are_no_character_do_not_hold_back_the_text_behind_them(
    tokenizer: Tokenizer,
) -> None:
    whole = tokenizer.encode("\N{EURO SIGN}")
    lead, space = whole[-3], tokenizer.encode("x cat")
    stream = TextStream(tokenizer.decode, tokenizer.encode("x"))
    text = "".join(stream.push(token) for token in [*whole[-3:], lead, *space])
    assert text.startswith("\N{EURO SIGN}") and text.replace(
        "\N{REPLACEMENT CHARACTER}", ""
    ).endswith("x cat")
    assert text.count("\N{REPLACEMENT CHARACTER}") == 1


def test_a_stop_string_in_what_was_held_back_counts() -> None:
    """One token may end a word and begin a character that never comes whole."""
    pieces = {1: "one ", 2: "END\N{REPLACEMENT CHARACTER}"}
    stream = TextStream(lambda ids: "".join(pieces[i] for i in ids), [], ("END",))
    assert stream.push(1) + stream.push(2) + stream.finish() == "one "
