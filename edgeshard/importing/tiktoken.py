"""A tokenizer that a model has as a file of tiktoken's only, as tokenizer.json.

Such a file has a line for each token, its bytes in base64 and its rank, which is its id. How text
is split before tokens are looked for, and some of the special tokens, stand in the model's own
Python code alone, which is not run: a table has them, by the name of the code's class.

tiktoken joins the two neighbours whose union has the lowest rank, again and again; so the merges
are all ways to cut each token into two, in the order of ranks. Two ways for one token never
compete: what stands between two borders is joined the same way wherever it stands, until a border
goes.

Sources: tiktoken (`src/lib.rs`, `tiktoken_ext/openai_public.py`), tokenization_kimi.py of Kimi K2
and Kimi Linear, tokenization_hy.py of Hunyuan-A13B.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.importing.bpe import WORDS, WordSplit, added_token, byte_level_document
from edgeshard.storage.forms import TOKENIZER, TOKENIZER_SETTINGS, check_small_file, malformed

RANKS_LIMIT_BYTES = 8 << 20
"""The most bytes of such a file; the largest published ones have half of them."""
PATTERN_KEY = "tiktoken_pattern"
"""The key in tokenizer_config.json that names a pattern of the table, where the class is not
known."""
_TOKEN_LIMIT_BYTES = 256
_MERGES_LIMIT = 1 << 20
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(beside: str, slash: str) -> tuple[str, ...]:
    """Words as o200k has them: capitals, then small letters; `beside` goes into the sets of
    letters."""
    capitals = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{beside}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{beside}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{capitals}*{small}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{capitals}+{small}*{_ENDINGS}",
        r"\p{N}{1,3}",
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )


def _none(base: int) -> dict[int, str]:
    return {}


def _kimi_special(base: int) -> dict[int, str]:
    return {base + index: f"<|reserved_token_{base + index}|>" for index in range(256)}


def _hunyuan_special(base: int) -> dict[int, str]:
    named = (
        "endoftext",
        "startoftext",
        "bos",
        "eos",
        "pad",
        *(f"extra_{index}" for index in range(205)),
    )
    return {base + index: f"<|{name}|>" for index, name in enumerate(named)}


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a tokenizer splits text, whether it composes it first (NFC), and its special tokens
    behind `base` others."""

    pattern: str
    composed: bool = False
    special: Callable[[int], Mapping[int, str]] = _none


_KINDS = {
    "cl100k": _Kind(WORDS % "{1,3}"),
    "o200k": _Kind("|".join(_cased("", "/"))),
    "kimi": _Kind("|".join((r"[\p{Han}]+", *_cased(r"&&[^\p{Han}]", ""))), special=_kimi_special),
    "hunyuan": _Kind(WORDS % "", composed=True, special=_hunyuan_special),
}
_CLASSES = {"TikTokenTokenizer": "kimi", "HYTokenizer": "hunyuan"}


def ranks_file(names: Iterable[str]) -> str | None:
    """The one of a model's files that has its tokens in tiktoken's form; None where no or no single
    one has."""
    candidates = [name for name in names if name == "tiktoken.model" or name.endswith(".tiktoken")]
    return candidates[0] if len(candidates) == 1 else None


def check_kind(ranks: str, settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError where nobody knows how the tokenizer of the file `ranks` splits
    text; `settings` is tokenizer_config.json."""
    _kind(ranks, settings)


def tokenizer_of(ranks: str, data: bytes, settings: Mapping[str, Any]) -> bytes:
    """The tokenizer.json of the file `ranks` with these bytes; `settings` is tokenizer_config.json.

    Raises InvalidArgumentError naming the file at fault, and as `check_kind` does.
    """
    kind = _kind(ranks, settings)
    tokens = _tokens(ranks, data)
    vocab = {_spelled(token): rank for rank, token in enumerate(tokens)}
    named = _named(settings, len(tokens))
    special = {
        index: text
        for index, text in kind.special(len(tokens)).items()
        if text not in dict(named.values())
    }
    added = {index: (text, True) for index, text in special.items()} | named
    for index, (text, _) in added.items():
        if text in vocab:
            raise malformed(
                TOKENIZER_SETTINGS,
                f"gives a token the id {index} that has another one",
                TOKENIZER_SETTINGS,
            )
        vocab[text] = index
    document = byte_level_document(
        vocab,
        [
            added_token(index, text, is_special)
            for index, (text, is_special) in sorted(added.items())
        ],
        _merges(ranks, tokens),
        WordSplit((kind.pattern,), composed=kind.composed, whole=True),
    )
    encoded = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
    check_small_file(TOKENIZER, encoded)
    return encoded


def _kind(ranks: str, settings: Mapping[str, Any]) -> _Kind:
    pattern = settings.get(PATTERN_KEY)
    name = (
        pattern if isinstance(pattern, str) else _CLASSES.get(str(settings.get("tokenizer_class")))
    )
    if name in _KINDS:
        return _KINDS[name]
    at_fault = (
        f"{PATTERN_KEY} {pattern[:40]!r}" if isinstance(pattern, str) else "its tokenizer_class"
    )
    raise UnsupportedModelError(
        f"neither {ranks} nor {at_fault} names the pattern that splits text; put the model's "
        f"tokenizer.json next to it, or the name of its pattern into {TOKENIZER_SETTINGS} as "
        f"{PATTERN_KEY} ({', '.join(_KINDS)})",
        field=TOKENIZER_SETTINGS,
        reason="UNKNOWN_TOKENIZER",
    )


def _tokens(name: str, data: bytes) -> list[bytes]:
    """The tokens in the order of their ranks."""
    if len(data) > RANKS_LIMIT_BYTES:
        raise malformed(name, f"has more than the {RANKS_LIMIT_BYTES} bytes that are accepted")
    token_by_rank: dict[int, bytes] = {}
    for line in data.splitlines():
        if not (parts := line.split()):
            continue
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1][:10])
        except (binascii.Error, IndexError, ValueError):
            raise malformed(
                name, f"has a line {line[:40]!r} that is not a base64 token with its rank"
            ) from None
        if not 0 < len(token) <= _TOKEN_LIMIT_BYTES:
            raise malformed(
                name, f"has a token of {len(token)} bytes; 1 to {_TOKEN_LIMIT_BYTES} are valid"
            )
        token_by_rank[rank] = token
    tokens = [token_by_rank[rank] for rank in range(len(token_by_rank)) if rank in token_by_rank]
    distinct_tokens = set(tokens)
    if len(distinct_tokens) != len(token_by_rank) or not distinct_tokens.issuperset(
        bytes((byte,)) for byte in range(256)
    ):
        raise malformed(
            name,
            "has no token for some byte, one token twice, or ranks other than 0, 1, 2 and so on",
        )
    return tokens


def _merges(name: str, tokens: list[bytes]) -> list[list[str]]:
    spelled = {token: _spelled(token) for token in tokens}
    merges: list[list[str]] = []
    for token in tokens:
        for cut in range(1, len(token)):
            left, right = spelled.get(token[:cut]), spelled.get(token[cut:])
            if left is not None and right is not None:
                merges.append([left, right])
        if len(merges) > _MERGES_LIMIT:
            raise malformed(name, f"has tokens that can be cut in more than {_MERGES_LIMIT} ways")
    return merges


def _named(settings: Mapping[str, Any], base: int) -> dict[int, tuple[str, bool]]:
    """The tokens that tokenizer_config.json names, by their ids, and whether each is special."""
    decoder = settings.get("added_tokens_decoder") or {}
    added_tokens: dict[int, tuple[str, bool]] = {}
    for index, token in decoder.items() if isinstance(decoder, Mapping) else ():
        text = token.get("content") if isinstance(token, Mapping) else None
        if (
            not index.isdecimal()
            or len(index) > 9
            or int(index) < base
            or not isinstance(text, str)
            or not text
        ):
            what = (
                f"has added_tokens_decoder[{index[:20]!r}], which is not a token after the "
                f"{base} of the model"
            )
            raise malformed(TOKENIZER_SETTINGS, what, TOKENIZER_SETTINGS)
        added_tokens[int(index)] = text, token.get("special") is not False
    return added_tokens


def _letters() -> str:
    """The letter that stands for each byte in tokenizer.json: itself where it can be seen, else one
    from U+0100 on."""
    visible_bytes = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(256) if byte not in visible_bytes]
    return "".join(
        chr(byte) if byte in visible_bytes else chr(256 + hidden.index(byte)) for byte in range(256)
    )


_LETTERS = _letters()


def _spelled(token: bytes) -> str:
    return token.decode("latin-1").translate(_LETTERS)
