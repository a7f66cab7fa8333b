"""Bounds of how much longer a tokenizer.json can make a text, from the file alone, without running
any of it.

A tokenizer replaces, prepends and decomposes before it looks for tokens, and each step doubles a
text at little cost in the file: forty in a row make a terabyte of a byte. Steps are told by their
keys and not by their `type`, because the library takes them without one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

MOST_GROWTH = 64.0
"""The most of a text before tokens are looked for; the tokenizers of the families that are served
have 1 to 12."""
MOST_DECODED_GROWTH = 64.0
"""The most of the text of tokens, which ordinary tokenizers leave as long as it is or double."""
MOST_REPEATS = 8.0
"""The most times that a text's tokens may stand among the special tokens around them."""

CHARSMAP = "precompiled_charsmap"
"""The key of a map of characters, in base64: the size of a trie in four bytes, the trie, and texts
behind it."""
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
_FACTORS = {
    # The most bytes of UTF-8 for one, by Unicode's FAQ on normalisation.
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    # Spaces around each ideograph of 3 bytes, decomposed, in lower case.
    "BertNormalizer": 5 / 3 * 3.0 * 1.5,
    # Decoders: a space for each token, which has a byte at least; or one between all letters, where
    # they look for an empty text.
    "WordPiece": 2.0,
    "BPEDecoder": 3.0,
    "CTC": 4.0,
}
_WITHOUT_A_TYPE = _FACTORS["BertNormalizer"]
"""The most that any of these does."""


def text_growth(tokenizer: Mapping[str, Any]) -> float:
    """The most bytes that tokens are looked for in, for each byte of a text, by the normaliser and
    the pre-tokeniser.

    The bound is never too low. It may be too high where a regular expression decides. An empty text
    counts as one byte.
    """
    return _growth(tokenizer.get("normalizer")) * _growth(tokenizer.get("pre_tokenizer"))


def decoded_growth(tokenizer: Mapping[str, Any]) -> float:
    """The most bytes of an answer's text for each byte of its tokens' texts, by the document's
    decoder."""
    return _growth(tokenizer.get("decoder"))


def repeats(tokenizer: Mapping[str, Any]) -> float:
    """The most times that the tokens of a text stand in its result, by the document's
    post-processor."""
    return prod(_repeats(step) for step in _leaves(tokenizer.get("post_processor")))


def loaded_growth(tokenizer: Any) -> float:
    """The `text_growth` of a `tokenizers.Tokenizer`, whose parts describe themselves as a document
    does."""
    parts = {"normalizer": tokenizer.normalizer, "pre_tokenizer": tokenizer.pre_tokenizer}
    return text_growth(
        {key: json.loads(part.__getstate__()) for key, part in parts.items() if part is not None}
    )


def _leaves(step: object) -> Iterator[Mapping[str, Any]]:
    """The steps of a sequence, in some order; a step alone is one by itself."""
    waiting = [step]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, dict):
            inner = next(
                (entry[key] for key in _SEQUENCES if isinstance(entry.get(key), list)), None
            )
            if inner is None:
                yield entry
            else:
                waiting += inner


def _growth(step: object) -> float:
    return prod(map(_growth_of_one, _leaves(step)))


def _growth_of_one(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if "content" in step and "pattern" in step:
        return _replaced(step["pattern"], _bytes(step["content"]))
    if isinstance(step.get("prepend"), str):
        # Once for each text between added tokens, and such a text has a byte at least.
        return 1.0 + _bytes(step["prepend"])
    if CHARSMAP in step:
        data = charsmap_bytes(step[CHARSMAP])
        # Behind the trie stand the texts, each with a zero byte at its end.
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return float(max(1, *map(len, texts)))
    if "replacement" in step:
        # For a space, or in front of a piece that does not begin with one.
        return 1.0 + _bytes(step["replacement"])
    if kind == "ByteLevel":
        # Each byte as a letter of up to 2, and perhaps one more of 2 in front of each piece.
        return 2.0 if step.get("add_prefix_space") is False else 4.0
    return _FACTORS.get(kind, 1.0) if isinstance(kind, str) else _WITHOUT_A_TYPE


def _replaced(pattern: object, content: int) -> float:
    """The most bytes for each byte of a text in which a pattern is replaced by `content` bytes.

    The rest stays as it is. An expression, or an empty text, may match between all bytes and at
    both ends.
    """
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, content / _bytes(text))
    return 1.0 + 2.0 * content


def charsmap_bytes(charsmap: object) -> bytes:
    """A map of characters without its base64; b"" where it has none."""
    try:
        return base64.b64decode(charsmap, validate=True) if isinstance(charsmap, str) else b""
    except (binascii.Error, ValueError):
        return b""


def _repeats(step: Mapping[str, Any]) -> float:
    single = step.get("single")
    items = single if isinstance(single, list) else []
    return float(max(1, sum(isinstance(item, dict) and "Sequence" in item for item in items)))


def _bytes(text: object) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
