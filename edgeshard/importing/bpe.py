"""tokenizer.json of byte-pair encodings, which other forms of tokenizers become. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How OpenAI's cl100k and many after it split text before merges; %s is how many digits stand together."""


def bpe_document(
    vocab: Mapping[str, int], added: Sequence[dict[str, Any]], *, model: dict[str, Any], **parts: Any
) -> dict[str, Any]:
    """The tokenizer.json of a BPE; `model` has the keys beside its type and vocabulary, `parts` the other steps."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        **parts,
        "model": {"type": "BPE", "vocab": dict(vocab), **model},
    }


def byte_level_document(
    vocab: Mapping[str, int],
    added: Sequence[dict[str, Any]],
    merges: list[list[str]],
    pattern: str,
    *,
    composed: bool = False,
    whole_words_first: bool = False,
    digits_apart: bool = False,
    post: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The tokenizer.json of a BPE over bytes, whose text is split by `pattern` first (""; as gpt2 does).

    Text is `composed` (NFC) where the model wants it. A piece that is a token needs no merges if `whole_words_first`.
    """
    splits: list[dict[str, Any]] = []
    if digits_apart:
        splits.append({"type": "Digits", "individual_digits": True})
    if pattern:
        splits.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits.append({**byte_level, "use_regex": not pattern})
    return bpe_document(
        vocab,
        added,
        normalizer={"type": "NFC"} if composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": splits},
        post_processor=post,
        decoder={**byte_level, "use_regex": True},
        model={"merges": merges, "byte_fallback": False, "ignore_merges": whole_words_first},
    )


def added_token(index: int, content: str, special: bool) -> dict[str, Any]:
    """A token that is found in a text as it is, before anything else."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **plain, "special": special}
