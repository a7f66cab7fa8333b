"""The small files of a model: files of their form are accepted, and everything else is refused by
name."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.storage import forms
from edgeshard.storage.forms import (
    GENERATION,
    TOKENIZER,
    check_small_file,
    parse_json_object,
    skim_small_file,
)
from tests.support.tokenizers import PANICS

PLAIN: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"0": 0, "1": 1}, "merges": [["0", "1"]]}
}


def tokenizer(**parts: Any) -> bytes:
    return json.dumps(PLAIN | parts).encode()


def charsmap(size: int, data: bytes) -> dict[str, Any]:
    text = base64.b64encode(size.to_bytes(4, "little") + data).decode()
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Precompiled", "precompiled_charsmap": text}],
        }
    }


@pytest.mark.parametrize(
    "data",
    [
        tokenizer(),
        tokenizer(added_tokens=[{"id": 2, "content": "<s>"}], **charsmap(4, bytes(8))),
        tokenizer(model={"type": "Unigram", "vocab": [["a", 0.0]]}),
        tokenizer(
            model={"type": "BPE", "continuing_subword_prefix": "", "vocab": {}, "merges": ["a b"]}
        ),
        tokenizer(
            model={
                "continuing_subword_prefix": "##",
                "vocab": {},
                "merges": ["a ##b", ["c", "##d"]],
            }
        ),
    ],
)
def test_tokenizers_of_every_kind_are_taken(data: bytes) -> None:
    check_small_file(TOKENIZER, data)
    skim_small_file(TOKENIZER, [data[:1], data[1:5], data[5:]])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"[]", "object"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "JSON"),
        (b'{"type": "service_account", "private_key": "canary"}', "no model"),
        (tokenizer(model={"type": "BPE"}), "no vocab"),
        (tokenizer(model={"vocab": {"a": 10**9}}), "id"),
        (tokenizer(model={"vocab": {"a": -1}}), "id"),
        (tokenizer(model={"vocab": {"a": True}}), "id"),
        (tokenizer(added_tokens=[{"id": 2**32, "content": "x"}]), "added_tokens"),
        (tokenizer(added_tokens=[7]), "added_tokens"),
        (tokenizer(**charsmap(2**32 - 1, bytes(8))), "precompiled_charsmap"),
        (tokenizer(**charsmap(9, bytes(8))), "precompiled_charsmap"),
        (tokenizer(normalizer={"precompiled_charsmap": "?"}), "precompiled_charsmap"),
        (tokenizer(normalizer={"precompiled_charsmap": 7}), "precompiled_charsmap"),
        (tokenizer(**PANICS["load"]), "continuing_subword_prefix"),
        (
            tokenizer(model={"continuing_subword_prefix": 7, "vocab": {}}),
            "continuing_subword_prefix",
        ),
        (tokenizer(model={"continuing_subword_prefix": "#", "vocab": {}, "merges": [7]}), "merges"),
        (b'{"model": {"vocab": {}}, "a": ' + b"[" * 200_000, "JSON"),
        (b'{"model": {"vocab": {}}, "a": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"a": 1, "a": 2, "model": {"vocab": {}}}', "twice"),
    ],
    ids=lambda value: str(value[:40]),
)
def test_what_is_no_tokenizer_is_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        check_small_file(TOKENIZER, data)
    assert caught.value.field == TOKENIZER and "canary" not in caught.value.message


@pytest.mark.parametrize("value", ["x", [None], [-1], [True], 2**31, {"a": 1}, [[1]], [0] * 5000])
def test_ends_of_sequence_are_token_ids(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="eos_token_id"):
        check_small_file(GENERATION, json.dumps({"eos_token_id": value}).encode())
    for good in (None, 2, [2, 3], []):
        check_small_file(GENERATION, json.dumps({"eos_token_id": good}).encode())


@pytest.mark.parametrize("data", [b"", b"  ", b"[1]", b"\xff", b'{"a": "\xc3'], ids=repr)
def test_skimming_finds_what_is_no_json(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        skim_small_file(TOKENIZER, [data])


def test_only_files_of_a_model_travel_with_it() -> None:
    with pytest.raises(InvalidArgumentError, match="not a file of a model"):
        check_small_file("id_rsa", b"{}")


def test_a_document_of_empty_lists_is_refused_before_it_takes_memory() -> None:
    """Each spelled by three bytes and held in sixty: the largest header there may be would take 700
    MB."""
    text = '{"a":[' + "[]," * (10 << 20) + "0]}"
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(InvalidArgumentError, match="values"):
        parse_json_object(text, "model.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 and time.process_time() - began < 1.0
    with pytest.raises(InvalidArgumentError, match="values"):
        skim_small_file(TOKENIZER, [text.encode()[: 20 << 20]])


def test_the_largest_document_that_is_read_takes_a_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forms, "JSON_VALUES_LIMIT", 1 << 16)
    text = '{"a":[' + "[]," * ((1 << 15) - 8) + "0]}"
    tracemalloc.start()
    parse_json_object(text, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * (1 << 16)
