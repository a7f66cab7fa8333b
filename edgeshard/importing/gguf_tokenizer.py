"""The tokenizer of a GGUF file as the small files that travel with a model: tokenizer.json and those beside it.

Two kinds: "gpt2", byte-level BPE with merges and the name of a rule that splits text first, and "llama", the BPE of
SentencePiece, whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.importing.bpe import WORDS, added_token, bpe_document, byte_level_document
from edgeshard.importing.gguf_file import GgufFile
from edgeshard.storage.forms import GENERATION, TOKENIZER, TOKENIZER_SETTINGS, check_small_file, malformed

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
_TEMPLATE = "tokenizer.chat_template"
_MERGES_LIMIT = 1 << 30
"""The most of the squares of pieces' lengths together, which their merges take as time; real ones have a thousandth."""
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split before merges, by the file's `tokenizer.ggml.pre`; "" is what gpt2 does.
_SPLITS = {
    "llama-bpe": WORDS % "{1,3}",
    "llama3": WORDS % "{1,3}",
    "llama-v3": WORDS % "{1,3}",
    "qwen2": WORDS % "",
    "deepseek-r1-qwen": WORDS % "",
    "tekken": _TEKKEN,
    "gpt-2": "",
    "smollm": "",
}
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>", "<|im_end|>"),
        *("<|endoftext|>", "<|end|>", "<|return|>", "<|call|>", "<|end_of_turn|>", "<end_of_turn>"),
        *("<|END_OF_TURN_TOKEN|>", "<turn|>", "<end_of_utterance>", "[|endofturn|]", "[EOS]", "[EOT]"),
        *("<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
"""The tokens that end an answer in the chat templates of published models."""
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})


def tokenizer_files(file: GgufFile, notes: list[str]) -> dict[str, bytes]:
    """The small files by name. A tokenizer of an unknown kind gives none, and a note of it in `notes`.

    Raises InvalidArgumentError for metadata that contradicts itself.
    """
    whole = file.metadata.get("tokenizer.huggingface.json")
    tokenizer = _object(whole) if isinstance(whole, str) else _tokenizer(file, notes)
    if tokenizer is None:
        return {}
    files = {TOKENIZER: tokenizer, TOKENIZER_SETTINGS: _config(file), GENERATION: _generation(file)}
    encoded = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}
    for name, data in encoded.items():
        check_small_file(name, data)
    return encoded


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tokenizer(file: GgufFile, notes: list[str]) -> dict[str, Any] | None:
    kind, split = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind == "llama":
        return _sentencepiece(file)
    if kind == "gpt2" and isinstance(split, str) and split in _SPLITS:
        return _byte_level(file, split)
    what = "no tokenizer" if kind is None else f"an unknown tokenizer ({str(kind)[:20]}, {str(split)[:20]})"
    notes.append(f"{file.path.name} has {what}; the checkpoint as safetensors has its own")
    return None


def _byte_level(file: GgufFile, split: str) -> dict[str, Any]:
    tokens, types = _tokens(file)
    merges = []
    for merge in _list(file, "merges", str):
        halves = merge.split(" ")
        if len(halves) != 2:
            raise _malformed(file, "merges")
        merges.append(halves)
    return byte_level_document(
        _vocab(tokens),
        _added(tokens, types),
        merges,
        _SPLITS[split],
        composed=split in _COMPOSED,
        whole_words_first=split in _WHOLE_WORDS_FIRST,
        digits_apart=split == "smollm",
        post=_post(file, tokens, default=split in ("llama-bpe", "llama3", "llama-v3")),
    )


def _sentencepiece(file: GgufFile) -> dict[str, Any]:
    tokens, types = _tokens(file)
    scores = _list(file, "scores", float)
    if len(scores) != len(tokens):
        raise _malformed(file, "scores")
    if sum(len(token) ** 2 for token in tokens) > _MERGES_LIMIT:
        raise _malformed(file, "tokens")
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return bpe_document(
        _vocab(tokens),
        _added(tokens, types),
        normalizer={"type": "Sequence", "normalizers": [*prefix, space]},
        pre_tokenizer=None,
        post_processor=_post(file, tokens, default=True),
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        model={
            "merges": merges_by_score(tokens, types, scores),
            "unk_token": _text_of(tokens, unknown),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    )


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """The merges of BPE that join as SentencePiece does: two neighbours whose union has the highest score go first."""
    known = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    ranked = sorted((-score, index) for index, score in enumerate(scores) if tokens[index] in known)
    return [
        [token[:cut], token[cut:]]
        for token in (tokens[index] for _, index in ranked)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = _list(file, "tokens", str)
    types = _list(file, "token_type", int) if "tokenizer.ggml.token_type" in file.metadata else [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens) or not tokens:
        raise _malformed(file, "tokens")
    return tokens, types


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    return [
        added_token(index, token, kind != _USER_DEFINED)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post(file: GgufFile, tokens: Sequence[str], default: bool) -> dict[str, Any] | None:
    """The post-processor that puts tokens before and behind each text, where the model wants them."""
    ends = []
    for flag, key, wanted in (("add_bos_token", "bos_token_id", default), ("add_eos_token", "eos_token_id", False)):
        chosen = file.metadata.get(f"tokenizer.ggml.{flag}", wanted) is True
        ends.append(_text_of(tokens, file.metadata.get(f"tokenizer.ggml.{key}")) if chosen else None)
    if ends == [None, None]:
        return None
    before, behind = ([] if end is None else [{"SpecialToken": {"id": end, "type_id": 0}}] for end in ends)
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*text, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {end: {"id": end, "ids": [tokens.index(end)], "tokens": [end]} for end in ends if end is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*before, *text, *behind],
        "pair": [*before, *pair, *behind],
        "special_tokens": special,
    }


def _config(file: GgufFile) -> dict[str, Any]:
    tokens, _ = _tokens(file)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    values = {
        name: _text_of(tokens, file.metadata.get(f"tokenizer.ggml.{key}_token_id")) for name, key in named.items()
    }
    return {name: value for name, value in values.items() if value is not None} | _templates(file)


def _templates(file: GgufFile) -> dict[str, Any]:
    """The chat template as a tokenizer_config.json has it: a text, or a list if the file names others."""
    default = file.metadata.get(_TEMPLATE)
    found = {"default": default} if isinstance(default, str) else {}
    for key, template in file.metadata.items():
        if key.startswith(f"{_TEMPLATE}.") and isinstance(template, str):
            found.setdefault(key.removeprefix(f"{_TEMPLATE}."), template)
    if not found:
        return {}
    if found.keys() == {"default"}:
        return {"chat_template": default}
    return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]}


def _generation(file: GgufFile) -> dict[str, Any]:
    """The generation_config.json: an answer ends with the end of a text, of a turn or of a message.

    Keys name them. Many files name one of them only, and mark the others as control tokens.
    """
    tokens, types = _tokens(file)
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = {token for token in named if type(token) is int and 0 <= token < len(tokens)}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token in _ENDS and kind in (_CONTROL, _USER_DEFINED):
            ends.add(index)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ({"eos_token_id": sorted(ends)} if ends else {}) | ({"bos_token_id": bos} if isinstance(bos, int) else {})


def _text_of(tokens: Sequence[str], index: object) -> str | None:
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or any(type(item) is not kind for item in found):
        raise _malformed(file, key)
    return found


def _malformed(file: GgufFile, key: str) -> InvalidArgumentError:
    name = f"tokenizer.ggml.{key}"
    return malformed(f"{file.path.name}: {name}", "is missing or contradicts the rest of the tokenizer", name)
