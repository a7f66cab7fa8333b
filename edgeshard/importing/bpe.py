"""tokenizer.json of byte-pair encodings, which other forms of tokenizers become. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How OpenAI's cl100k and many after it split text before merges; %s is how many digits stand
together."""


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How a text is split before merges: by each of `patterns` in turn, or as gpt2 does if there
    are none.

    Each digit is split off before the patterns if `digits_first`, after them if `digits_last`. Text
    is `composed` (NFC) if the model wants it. A piece that is a token needs no merges if `whole`. A
    text `begins` with the token for that unless the model's settings contradict.
    """

    patterns: tuple[str, ...] = ()
    digits_first: bool = False
    digits_last: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


def bpe_document(
    vocab: Mapping[str, int],
    added: Sequence[dict[str, Any]],
    *,
    model: dict[str, Any],
    **parts: Any,
) -> dict[str, Any]:
    """The tokenizer.json of a BPE; `model` has the keys beside its type and vocabulary, `parts` the
    other steps."""
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
    split: WordSplit,
    post: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The tokenizer.json of a BPE over bytes, whose text is split into words first."""
    digits = {"type": "Digits", "individual_digits": True}
    steps: list[dict[str, Any]] = [digits] if split.digits_first else []
    for pattern in split.patterns:
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    if split.digits_last:
        steps.append(digits)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": not split.patterns})
    return bpe_document(
        vocab,
        added,
        normalizer={"type": "NFC"} if split.composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        post_processor=post,
        decoder={**byte_level, "use_regex": True},
        model={"merges": merges, "byte_fallback": False, "ignore_merges": split.whole},
    )


def added_token(index: int, content: str, special: bool) -> dict[str, Any]:
    """A token that is found in a text as it is, before anything else."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **plain, "special": special}
