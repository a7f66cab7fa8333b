"""A token as text: what people copy, and what they get wrong."""

from __future__ import annotations

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import JoinToken, Principal, Role
from edgeshard.wire.identity import token_from_text, token_to_text

TOKEN = JoinToken((b"der" * 100,), Principal("mill", Role.AGENT, "b"), "a:1", "a:2", "0123456789abcdef", b"s" * 32)


def test_it_is_one_word_and_comes_back() -> None:
    text = token_to_text(TOKEN)
    assert text.replace("-", "").replace("_", "").isalnum()
    assert token_from_text(f"  {text}\n") == TOKEN


@pytest.mark.parametrize("text", ["", "edgeshard1-", "edgeshard1-AAAA", "x", "edgeshard1-" + "A" * 20_000])
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        token_from_text(text)
    assert refusal.value.field == "token" and "AAAA" not in refusal.value.message


def test_a_part_of_one_is_none_and_is_not_shown() -> None:
    text = token_to_text(TOKEN)
    for end in range(0, len(text) - 1, 7):
        with pytest.raises(InvalidArgumentError) as refusal:
            token_from_text(text[:end])
        assert text[20:60] not in refusal.value.message


def test_it_does_not_show_its_secret() -> None:
    assert "sss" not in repr(TOKEN)
