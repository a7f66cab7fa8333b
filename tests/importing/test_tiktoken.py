"""A tokenizer of tiktoken's as tokenizer.json: the tokens are those of tiktoken's own way to find
them."""

from __future__ import annotations

import base64
import json
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from bench.quantisation import VALIDATION
from edgeshard.architectures import expected_tensors
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.importing.blocks import Width
from edgeshard.importing.model_sources import open_directory
from edgeshard.importing.tiktoken import RANKS_LIMIT_BYTES, ranks_file, tokenizer_of
from tests.support.imports import nothing, tensors_of, write_checkpoint

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "cl100k": WORDS,
    "o200k": O200K,
    "kimi": r"[\p{Han}]+|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("/]", "]"),
    "hunyuan": WORDS.replace("{1,3}", ""),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cl100k": {
        "tiktoken_pattern": "cl100k",
        "added_tokens_decoder": {"900": {"content": "<|endoftext|>"}},
    },
    "o200k": {
        "tiktoken_pattern": "o200k",
        "added_tokens_decoder": {"901": {"content": "<|endoftext|>"}},
    },
    "kimi": {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {
            "901": {"content": "[EOS]", "special": True},
            "902": {"content": "<|tool_call_begin|>", "special": False},
        },
    },
    "hunyuan": {"tokenizer_class": "HYTokenizer"},
}
TEXTS = (
    "Once upon a time there were 12345 kings, who DIDN'T  know\n\n what 7 e\u0301 or é was; "
    "they'll path/to//file.\r\n",
    "日本語のテキストと漢字混じりabc and 你好，世界。今天天气很好 ελληνικά\t!!  after 🙂🙂",
    "aaaaaaaaaaa bbabbabab ababab    \n   ",
    "ſ 'ſ K İstanbul ǅ ʰ ١٢٣٤ \u3000\u00a0x\u2028y",
    "",
)


@cache
def ranks() -> dict[bytes, int]:
    """900 tokens that a little text was made of."""
    trained = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS["cl100k"]), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=890, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(
        [VALIDATION.read_text(encoding="utf-8")[:60_000], *TEXTS * 9], trainer
    )
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(hidden)
    }
    tokens = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    found = [bytes(byte_of[letter] for letter in token) for token, _ in tokens]
    # Tokens that no merges lead to: a piece that is one is taken whole all the same.
    found += [
        token for token in (b"qzqzq", b" kings,", b"abab", b"babab", b"aba") if token not in found
    ]
    found += [b"~%d~" % at for at in range(900 - len(found))]
    return {token: rank for rank, token in enumerate(found)}


def file_of(tokens: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in tokens.items())


@cache
def converted(name: str) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_of("tiktoken.model", file_of(ranks()), SETTINGS[name]))


def special_of(name: str) -> dict[str, int]:
    base = len(ranks())
    named = {
        token["content"]: int(index)
        for index, token in SETTINGS[name].get("added_tokens_decoder", {}).items()
    }
    if name == "kimi":
        named |= {
            f"<|reserved_token_{at}|>": at
            for at in range(base, base + 256)
            if at not in named.values()
        }
    if name == "hunyuan":
        texts = [
            "endoftext",
            "startoftext",
            "bos",
            "eos",
            "pad",
            *(f"extra_{at}" for at in range(205)),
        ]
        named |= {f"<|{text}|>": base + at for at, text in enumerate(texts)}
    return named


def joined(ranks: dict[bytes, int], data: bytes) -> list[int]:
    """As tiktoken does: the two neighbours whose union has the lowest rank, the first of them,
    again and again."""
    if data in ranks:
        return [ranks[data]]
    pieces = [data[at : at + 1] for at in range(len(data))]
    while pairs := [
        (ranks[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ranks
    ]:
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [ranks[piece] for piece in pieces]


def tokens_of(name: str, text: str) -> list[int]:
    """Special tokens first, then pieces by the pattern."""
    special = special_of(name)
    found: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            found.append(special[part])
            continue
        for piece in regex.finditer(PATTERNS[name], part, regex.V1):
            found += joined(ranks(), piece[0].encode())
    return found


@pytest.mark.parametrize("name", PATTERNS)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.text(" \n\r\tabAB'sltdre019/.漢字éÉ", max_size=20),
            st.sampled_from(
                [
                    *TEXTS,
                    "[EOS]",
                    "<|reserved_token_950|>",
                    "<|eos|>",
                    "<|endoftext|>",
                    "qzqzq",
                    "abababa",
                ]
            ),
        ),
        max_size=6,
    ).map("".join)
)
@example("".join(TEXTS))
@example("a[EOS]b<|tool_call_begin|><|reserved_token_1155|><|extra_204|>")
def test_the_tokens_of_a_text_are_tiktokens(name: str, text: str) -> None:
    text = unicodedata.normalize("NFC", text) if name == "hunyuan" else text
    found = converted(name).encode(text, add_special_tokens=True).ids
    assert found == tokens_of(name, text)
    assert converted(name).decode(found, skip_special_tokens=False) == text


@given(
    st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=24),
    st.text("abc", max_size=24),
)
@example(["aa", "aaa", "aaaa"], "aaaaaaa")
def test_no_order_of_ranks_gives_other_tokens(tokens: list[str], text: str) -> None:
    """Also where a token can be cut in several ways, or in none that its parts lead to."""
    own = {bytes((byte,)): byte for byte in range(256)}
    own |= {token.encode(): 256 + rank for rank, token in enumerate(tokens)}
    made = Tokenizer.from_buffer(
        tokenizer_of("x.tiktoken", file_of(own), {"tiktoken_pattern": "cl100k"})
    )
    assert made.encode(text).ids == (joined(own, text.encode()) if text else [])


def test_hunyuan_composes_letters_first() -> None:
    assert converted("hunyuan").encode("e\u0301").ids == tokens_of("hunyuan", "é")
    assert converted("kimi").encode("e\u0301").ids == tokens_of("kimi", "e\u0301")


def test_special_tokens_are_those_that_the_settings_name_and_the_class_has() -> None:
    added = converted("kimi").get_added_tokens_decoder()
    assert len(added) == 256 and min(added) == 900
    assert (added[900].content, added[901].content) == ("<|reserved_token_900|>", "[EOS]")
    assert added[901].special and not added[902].special
    assert converted("hunyuan").token_to_id("<|extra_204|>") == 900 + 209


def test_a_model_with_such_a_file_alone_gets_a_tokenizer(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 4, "vocab_size": 61, "max_position_embeddings": 64}
    tensors = {
        name if name == "lm_head.weight" else f"model.{name}": torch.zeros(tensor.shape)
        for name, tensor in expected_tensors(config).items()
    }
    directory = write_checkpoint(tmp_path / "model", config, tensors)
    (directory / "hy.tiktoken").write_bytes(file_of(ranks()))
    (directory / "tokenizer_config.json").write_text(json.dumps(SETTINGS["hunyuan"]))
    imported = open_directory(directory, tmp_path, Width.INT8, nothing)
    assert imported.notes == (
        "its tokenizer.json was made of hy.tiktoken, without the model's code",
    )
    manifest, _ = tensors_of(imported)
    assert {file.name for file in manifest.files} == {"tokenizer.json", "tokenizer_config.json"}
    (made,) = (file.path for file in imported.checkpoint.files if file.name == "tokenizer.json")
    assert (
        Tokenizer.from_file(str(made)).encode(TEXTS[0]).ids
        == converted("hunyuan").encode(TEXTS[0]).ids
    )
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    assert not open_directory(directory, tmp_path, Width.INT8, nothing).notes, "its own goes first"


def test_a_tokenizer_whose_pattern_is_not_known_is_refused_with_what_to_do() -> None:
    for settings in ({}, {"tokenizer_class": "SomeTokenizer"}, {"tiktoken_pattern": "p50k"}):
        with pytest.raises(
            UnsupportedModelError, match=r"put the model's tokenizer\.json next to it, or the name"
        ) as caught:
            tokenizer_of("x.tiktoken", file_of(ranks()), settings)
        assert (
            caught.value.field == "tokenizer_config.json"
            and caught.value.reason == "UNKNOWN_TOKENIZER"
        )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"IQ== 0\nno base64! 1\n", "is not a base64 token"),
        (b"IQ==\n", "is not a base64 token"),
        (b"IQ== x\n", "is not a base64 token"),
        (b"IQ== 0\n", "no token for some byte"),
        (file_of(ranks()).replace(b" 899\n", b" 900\n"), "ranks other than 0"),
        (file_of(ranks()) + b"IQ== 900\n", "one token twice"),
        (base64.b64encode(b"x" * 300) + b" 0\n", "300 bytes"),
        (b"\n" * (RANKS_LIMIT_BYTES + 1), "are accepted"),
    ],
)
def test_a_file_that_breaks_the_rules_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        tokenizer_of("x.tiktoken", data, SETTINGS["kimi"])
    assert caught.value.field == "x.tiktoken"


@pytest.mark.parametrize(
    "decoder",
    [{"3": {"content": "x"}}, {"x": {"content": "x"}}, {"901": {}}, {"901": {"content": "a"}}],
)
def test_settings_that_contradict_the_tokens_are_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tokenizer_of(
            "x.tiktoken", file_of(ranks()), SETTINGS["kimi"] | {"added_tokens_decoder": decoder}
        )
    assert caught.value.field == "tokenizer_config.json"


def test_the_file_is_found_where_there_is_one_alone() -> None:
    assert ranks_file(["config.json", "tiktoken.model"]) == "tiktoken.model"
    assert ranks_file(["hy.tiktoken", "x.py"]) == "hy.tiktoken"
    assert (
        ranks_file(["a.tiktoken", "b.tiktoken"]) is None and ranks_file(["tokenizer.model"]) is None
    )
