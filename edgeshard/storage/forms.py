"""JSON from strangers: read within a bound of memory; and the small files of a model, held against their form.

A small file is checked where it is added, and again by who takes it. None of it is code, but the tokenizer's library
trusts some numbers: what makes it allocate gigabytes or panic is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.chat import GenerationDefaults
from edgeshard.storage import growth

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
TOKENIZER_SETTINGS, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
EXPERT_TABLE = "edgeshard_experts.json"
EXPERT_TABLE_PARTS = ("base", "last", "earlier")
JSON_VALUES_LIMIT = 1 << 22
"""Of one document: each takes some 60 bytes of memory and may be spelled by 2. The largest tokenizers have half."""
TOKEN_LIMIT = 1 << 22
"""Of a vocabulary; the largest published ones have a quarter of a million."""
_EOS_LIMIT = 4096
_TEMPLATES_LIMIT = 16
_CHARSMAP = "precompiled_charsmap"


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in `text`; raises InvalidArgumentError, naming `name`, for anything else or a repeated key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key appears twice")
        return values

    if json_values(text) > JSON_VALUES_LIMIT:
        raise malformed(name, f"may hold more than {JSON_VALUES_LIMIT} values, the most that are read")
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise malformed(name, f"is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise malformed(name, "is not a JSON object")
    return value


def json_values(text: str | bytes) -> int:
    """No fewer than the values that parsing would make; commas and brackets in strings count too."""
    if isinstance(text, bytes):
        return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")
    return 1 + text.count(",") + text.count("[") + text.count("{")


def decode_text(data: bytes, name: str) -> str:
    """Raises InvalidArgumentError for bytes that are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise malformed(name, "is not UTF-8") from None


def check_small_file(name: str, data: bytes) -> None:
    """Raise InvalidArgumentError unless a file that travels with a model has the form that its name promises."""
    check = _CHECKS.get(name)
    if check is None:
        raise malformed(name, f"is not a file of a model; those are {', '.join(_CHECKS)}")
    check(decode_text(data, name))


def skim_small_file(name: str, chunks: Iterable[bytes]) -> None:
    """As `check_small_file`, as far as can be told piece by piece: a daemon must not stand still to parse it whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    values, begins = 0, True
    try:
        for chunk in chunks:
            values += json_values(chunk)
            text = decoder.decode(chunk)
            if begins and text and not text.lstrip().startswith("{"):
                raise malformed(name, "is not a JSON object")
            begins = begins and not text
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise malformed(name, "is not UTF-8") from None
    if begins:
        raise malformed(name, "is empty")
    if values > JSON_VALUES_LIMIT:
        raise malformed(name, f"may hold more than {JSON_VALUES_LIMIT} values, the most that are read")


def eos_tokens_of(generation_config: dict[str, Any]) -> frozenset[int] | None:
    """End-of-sequence ids of a generation_config.json, None where it has none. Raises InvalidArgumentError."""
    found = generation_config.get("eos_token_id")
    items = found if isinstance(found, list) else [] if found is None else [found]
    if len(items) > _EOS_LIMIT or not all(_is_token(item) for item in items):
        raise malformed(GENERATION, "has an eos_token_id that is neither a token id nor a list of them")
    return frozenset(items) or None


def defaults_of(generation_config: dict[str, Any]) -> GenerationDefaults:
    """What a generation_config.json recommends. Raises InvalidArgumentError for what no request may ask for.

    `do_sample: false` is greedy, whatever stands beside it; without it a temperature counts, as with other servers.
    """
    if generation_config.get("do_sample") is False:
        return GenerationDefaults(temperature=0.0)
    values: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("repetition_penalty", float)):
        value = generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and value != int(value)):
            raise malformed(GENERATION, f"has a {name} that is no number")
        values[name] = kind(value)
    if generation_config.get("do_sample") is True:
        values.setdefault("temperature", 1.0)
    defaults = GenerationDefaults(**values)
    try:
        defaults.validate()
    except InvalidArgumentError as error:
        raise malformed(GENERATION, f"has a {error.message}") from None
    return defaults


def templates_of(tokenizer_settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates in a tokenizer_config.json by name, "default" for one without. Raises InvalidArgumentError."""
    found = tokenizer_settings.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    items = found if isinstance(found, list) else [None]
    pairs = [(item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None) for item in items]
    if len(pairs) > _TEMPLATES_LIMIT or not all(isinstance(part, str) for pair in pairs for part in pair):
        raise malformed(TOKENIZER_SETTINGS, "has a chat_template that is neither a text nor a list of named ones")
    return {str(name): str(template) for name, template in pairs}


def special_tokens_of(tokenizer_settings: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names, such as `bos_token`, by their texts."""
    tokens: dict[str, str] = {}
    for name, value in tokenizer_settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def malformed(name: str, what: str, field: str = "", reason: str = "MALFORMED_CHECKPOINT") -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {what}", field=field or name, reason=reason)


def _check_tokenizer(values: dict[str, Any]) -> None:
    model = values.get("model")
    if not isinstance(model, dict):
        raise malformed(TOKENIZER, "has no model; use the tokenizer.json of the checkpoint")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict | list) or len(vocab) > TOKEN_LIMIT:
        raise malformed(TOKENIZER, f"has no vocab of at most {TOKEN_LIMIT} tokens")
    if isinstance(vocab, dict) and not all(_is_token(token) for token in vocab.values()):
        raise malformed(TOKENIZER, f"has a vocab with an id that is not between 0 and {TOKEN_LIMIT}")
    added = values.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(item, dict) and _is_token(item.get("id")) for item in added):
        raise malformed(TOKENIZER, f"has added_tokens with an id that is not between 0 and {TOKEN_LIMIT}")
    _check_merges(model)
    for found in _found({key: part for key, part in values.items() if key != "model"}, _CHARSMAP):
        _check_charsmap(found)
    _check_growth(values)


def _check_growth(values: dict[str, Any]) -> None:
    """A chain of steps that each double a text takes all memory for a prompt of four letters."""
    for found, most, what in (
        (growth.text_growth(values), growth.MOST_GROWTH, "a normalizer and a pre_tokenizer that make a text"),
        (growth.decoded_growth(values), growth.MOST_DECODED_GROWTH, "a decoder that makes a text"),
        (growth.repeats(values), growth.MOST_REPEATS, "a post_processor that makes a text's tokens"),
    ):
        if found > most:
            raise malformed(
                TOKENIZER,
                f"has {what} {found:.3g} times as long, and at most {most:g} are taken; use the tokenizer.json of the "
                "checkpoint",
                reason="TOKENIZER_GROWS",
            )


def _check_merges(model: dict[str, Any]) -> None:
    """The library cuts the prefix off the second half of each merge, and panics where it is longer than that."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix:
        return
    merges = model.get("merges") or []
    if not isinstance(prefix, str) or not isinstance(merges, list):
        raise malformed(TOKENIZER, "has a continuing_subword_prefix or merges of another kind than texts")
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(halves, list) or len(halves) != 2 or not all(isinstance(half, str) for half in halves):
            raise malformed(TOKENIZER, "has merges that are not pairs of texts")
        if not halves[1].startswith(prefix):
            raise malformed(TOKENIZER, "has a merge whose second half lacks the continuing_subword_prefix")


def _check_charsmap(value: object) -> None:
    """The library allocates what the first four bytes say, whatever follows them."""
    if value is None:
        return
    try:
        data = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if len(data) < 4 or int.from_bytes(data[:4], "little") > len(data) - 4:
        raise malformed(TOKENIZER, f"has a {_CHARSMAP} that is shorter than it says")


def _found(value: object, key: str) -> Iterator[object]:
    """Whatever stands under `key` anywhere in a document."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if key in value:
                yield value[key]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_LIMIT


def _check_generation(values: dict[str, Any]) -> None:
    eos_tokens_of(values)


def expert_table_of(values: dict[str, Any]) -> dict[str, list[Any]]:
    """The three arrays of a table that forecasts experts; what is in them is for the node to check, by its model."""
    for part in EXPERT_TABLE_PARTS:
        if not isinstance(values.get(part), list):
            raise malformed(EXPERT_TABLE, f"has no list {part!r}")
    return {part: values[part] for part in EXPERT_TABLE_PARTS}


def _json_of(name: str, check: Callable[[dict[str, Any]], object]) -> Callable[[str], object]:
    return lambda text: check(parse_json_object(text, name))


_CHECKS: dict[str, Callable[[str], object]] = {
    TOKENIZER: _json_of(TOKENIZER, _check_tokenizer),
    GENERATION: _json_of(GENERATION, _check_generation),
    TOKENIZER_SETTINGS: _json_of(TOKENIZER_SETTINGS, templates_of),
    CHAT_TEMPLATE: lambda text: None,
    EXPERT_TABLE: _json_of(EXPERT_TABLE, expert_table_of),
}
SMALL_FILES = tuple(_CHECKS)
"""The names of the files that travel with a model."""
