"""The bound of a tokenizer's growth is never too low: the library itself, with random steps and
texts, is below it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgeshard.storage.growth import decoded_growth, loaded_growth, text_growth
from tests.support.chat_models import DEMO_MODEL

LETTERS = "aab A\N{LATIN CAPITAL LETTER A WITH STROKE}é\N{HANGUL SYLLABLE GAG}漢ﷺ▁\U0001d1c0"
texts = st.text(LETTERS, min_size=1, max_size=12)
short = st.text(LETTERS, max_size=4)
replace = st.builds(
    lambda kind, pattern, content: {
        "type": "Replace",
        "pattern": {kind: pattern},
        "content": content,
    },
    st.just("String"),
    short,
    short,
) | st.builds(
    lambda pattern, content: {"type": "Replace", "pattern": {"Regex": pattern}, "content": content},
    st.sampled_from(["a", "", "$", "^", "(?=a)", "a*", " {2,}", "."]),
    short,
)
named = st.sampled_from(
    ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"]
).map(lambda kind: {"type": kind})
prepend = short.map(lambda text: {"type": "Prepend", "prepend": text})
bert = st.just(
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": True,
        "lowercase": True,
    }
)
normalisers = st.lists(replace | named | prepend | bert, max_size=4)
byte_level = st.booleans().map(
    lambda first: {
        "type": "ByteLevel",
        "add_prefix_space": first,
        "trim_offsets": True,
        "use_regex": True,
    }
)
metaspace = st.builds(
    lambda letter, scheme: {
        "type": "Metaspace",
        "replacement": letter,
        "prepend_scheme": scheme,
        "split": True,
    },
    st.sampled_from("_▁\U0001d1c0"),
    st.sampled_from(["always", "never", "first"]),
)
other = st.sampled_from(["Whitespace", "Punctuation", "UnicodeScripts"]).map(
    lambda kind: {"type": kind} | ({"behavior": "Isolated"} if kind == "Punctuation" else {})
)
pretokenizers = st.lists(byte_level | metaspace | other, max_size=3)


def made(normaliser: list[Any], pretokenizer: list[Any]) -> tuple[Tokenizer, dict[str, Any]]:
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normaliser},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pretokenizer},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    return Tokenizer.from_str(json.dumps(document)), document


@settings(deadline=None)
@given(normalisers, pretokenizers, texts)
def test_no_text_grows_by_more(normaliser: list[Any], pretokenizer: list[Any], text: str) -> None:
    tokenizer, document = made(normaliser, pretokenizer)
    bound = text_growth(document) * len(text.encode())
    try:
        normalised = tokenizer.normalizer.normalize_str(text)
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(normalised) if normalised else []
    except BaseException as error:
        # The library panics at some of them. A panic's class is no Exception, and cannot be
        # imported.
        assume(type(error).__name__ != "PanicException")
        raise
    assert len(normalised.encode()) <= bound
    assert sum(len(piece.encode()) for piece, _ in pieces) <= bound
    assert loaded_growth(tokenizer) <= text_growth(document), (
        "what was loaded says the same or more exactly"
    )


@settings(deadline=None)
@given(st.lists(replace, max_size=4), texts)
def test_no_answer_grows_by_more(decoders: list[Any], text: str) -> None:
    tokenizer, document = made([], [])
    document |= {
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": {text: 0}, "merges": []},
    }
    tokenizer = Tokenizer.from_str(json.dumps(document))
    assert len(tokenizer.decode([0]).encode()) <= decoded_growth(document) * len(text.encode())


def test_the_steps_of_known_tokenizers_are_below_the_limit_by_far() -> None:
    llama = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    gpt = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert text_growth({"normalizer": {"type": "Sequence", "normalizers": llama}}) == 12
    assert text_growth({"normalizer": {"type": "NFC"}, "pre_tokenizer": gpt}) == 6
    assert text_growth(json.loads((DEMO_MODEL / "tokenizer.json").read_text())) == 3


@pytest.mark.parametrize("depth", [1, 200])
def test_sequences_may_be_within_each_other(depth: int) -> None:
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        step = {"normalizers": [step, {"prepend": "a"}]}
    assert text_growth({"normalizer": step}) == 3 * 2.0**depth
