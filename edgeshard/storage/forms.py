"""JSON from strangers, read within a bound of memory; and the small files of a model, held against
their form.

A small file is checked where it is added, and again by each process that takes it. None of it is
code, but the tokenizer's library trusts some numbers: a file that makes it allocate gigabytes or
panic is refused by name.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.domain.requests.conversation import GenerationDefaults
from edgeshard.storage import growth

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
TOKENIZER_SETTINGS, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
EXPERT_TABLE = "edgeshard_experts.json"
EXPERT_TABLE_PARTS = ("base", "last", "earlier")
JSON_VALUES_LIMIT = 1 << 22
"""The most values of one document. Each takes some 60 bytes of memory and may be spelled by 2; the
largest tokenizers have half of them."""
TOKEN_LIMIT = 1 << 22
"""The most tokens of a vocabulary; the largest published ones have a quarter of a million."""
_EOS_LIMIT = 4096
_RECOMMENDED: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
}
_KIND_NAMES = {int: "whole number", float: "number"}
_TEMPLATES_LIMIT = 16


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises InvalidArgumentError, naming `name`, for anything else or a
    repeated key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a key appears twice")
        return values

    if json_values(text) > JSON_VALUES_LIMIT:
        raise malformed(
            name, f"may hold more than {JSON_VALUES_LIMIT} values, the most that are read"
        )
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise malformed(name, f"is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise malformed(name, "is not a JSON object")
    return value


def json_values(text: str | bytes) -> int:
    """An upper bound of the values that parsing would make; commas and brackets in strings count
    too."""
    if isinstance(text, bytes):
        return 1 + sum(map(text.count, (b",", b"[", b"{")))
    return 1 + sum(map(text.count, (",", "[", "{")))


def decode_text(data: bytes, name: str) -> str:
    """The text of `data`. Raises InvalidArgumentError, naming `name`, for bytes that are not
    UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise malformed(name, "is not UTF-8") from None


def check_small_file(name: str, data: bytes) -> None:
    """Raise InvalidArgumentError unless a file that travels with a model has the form that its name
    promises."""
    if name not in _CHECKS:
        raise malformed(name, f"is not a file of a model; those are {', '.join(_CHECKS)}")
    text = decode_text(data, name)
    if (check := _CHECKS[name]) is not None:
        check(parse_json_object(text, name))


def skim_small_file(name: str, chunks: Iterable[bytes]) -> None:
    """Check a small file as far as can be told piece by piece: a daemon must not stand still to
    parse it whole.

    Raises InvalidArgumentError as `check_small_file` does.
    """
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
        raise malformed(
            name, f"may hold more than {JSON_VALUES_LIMIT} values, the most that are read"
        )


def eos_tokens_of(generation_config: dict[str, Any]) -> frozenset[int] | None:
    """The end-of-sequence ids of a generation_config.json, None where it has none. Raises
    InvalidArgumentError."""
    eos = generation_config.get("eos_token_id")
    items = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if len(items) > _EOS_LIMIT or not all(_is_token(item) for item in items):
        raise malformed(
            GENERATION, "has an eos_token_id that is neither a token id nor a list of them"
        )
    return frozenset(items) or None


def defaults_of(generation_config: dict[str, Any]) -> GenerationDefaults:
    """The options that a generation_config.json recommends, without those that no request may ask
    for.

    `do_sample: false` is greedy, whatever stands beside it; without it a temperature counts, as
    with other servers.
    """
    return _recommended(generation_config)[0]


def unusable_defaults(generation_config: dict[str, Any]) -> tuple[str, ...]:
    """The recommendations that `defaults_of` leaves out, each with the reason."""
    return _recommended(generation_config)[1]


def _recommended(generation_config: dict[str, Any]) -> tuple[GenerationDefaults, tuple[str, ...]]:
    if generation_config.get("do_sample") is False:
        return GenerationDefaults(temperature=0.0), ()
    values: dict[str, Any] = {}
    unusable: list[str] = []
    for name, kind in _RECOMMENDED.items():
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            values[name] = _recommendation(name, value, kind)
        except InvalidArgumentError as error:
            unusable.append(error.message)
    if generation_config.get("do_sample") is True:
        values.setdefault("temperature", 1.0)
    return GenerationDefaults(**values), tuple(unusable)


def _recommendation(name: str, value: object, kind: type[int] | type[float]) -> int | float:
    """The value as a request has it. Raises InvalidArgumentError for one that no request may
    have."""
    refused = InvalidArgumentError(
        f"{name} is {repr(value)[:40]}; it must be a {_KIND_NAMES[kind]}", field=name
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused
    try:
        number = kind(value)
    except (
        OverflowError,
        ValueError,
    ):
        # a NaN or an infinity as a whole number, or digits without end
        raise refused from None
    if number != value or abs(number) == math.inf:
        raise refused
    values: dict[str, Any] = {name: number}
    GenerationDefaults(**values).validate()
    return number


def end_text_of(tokenizer_settings: dict[str, Any]) -> str | None:
    """The text of the token that ends an answer by a tokenizer_config.json; None if it names
    none."""
    return special_tokens_of(tokenizer_settings).get("eos_token")


def token_id(tokenizer: dict[str, Any], text: str) -> int | None:
    """The id of the token with this text in a tokenizer.json; None if there is none."""
    added = tokenizer.get("added_tokens")
    for item in added if isinstance(added, list) else ():
        if isinstance(item, dict) and item.get("content") == text:
            return item.get("id") if _is_token(item.get("id")) else None
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    vocab_id = vocab.get(text) if isinstance(vocab, dict) else None
    return vocab_id if _is_token(vocab_id) else None


def templates_of(tokenizer_settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates in a tokenizer_config.json by name; a single one is called "default".

    Raises InvalidArgumentError.
    """
    templates = tokenizer_settings.get("chat_template")
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    items = templates if isinstance(templates, list) else [None]
    pairs = [
        (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        for item in items
    ]
    if len(pairs) > _TEMPLATES_LIMIT or not all(
        isinstance(part, str) for pair in pairs for part in pair
    ):
        raise malformed(
            TOKENIZER_SETTINGS,
            "has a chat_template that is neither a text nor a list of named ones",
        )
    return {str(name): str(template) for name, template in pairs}


def special_tokens_of(tokenizer_settings: dict[str, Any]) -> dict[str, str]:
    """The texts of the special tokens in a tokenizer_config.json, by their names, such as
    `bos_token`."""
    named = {name: value for name, value in tokenizer_settings.items() if name.endswith("_token")}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def malformed(
    name: str, what: str, field: str = "", reason: str = "MALFORMED_CHECKPOINT"
) -> InvalidArgumentError:
    """The error of a file `name` that is not as it must be; `what` goes on with the sentence."""
    return InvalidArgumentError(f"{name} {what}", field=field or name, reason=reason)


def truncated(name: str, what: str, field: str = "") -> DataLossError:
    """The error of a file `name` that ends within `what`."""
    message = f"{name} ends before the end of {what}; fetch the file again"
    return DataLossError(message, field=field or name, reason="TRUNCATED")


def _check_tokenizer(values: dict[str, Any]) -> None:
    model = values.get("model")
    if not isinstance(model, dict):
        raise malformed(TOKENIZER, "has no model; use the tokenizer.json of the checkpoint")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict | list) or len(vocab) > TOKEN_LIMIT:
        raise malformed(TOKENIZER, f"has no vocab of at most {TOKEN_LIMIT} tokens")
    if isinstance(vocab, dict) and not all(_is_token(token) for token in vocab.values()):
        raise malformed(
            TOKENIZER, f"has a vocab with an id that is not between 0 and {TOKEN_LIMIT}"
        )
    added = values.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(item, dict) and _is_token(item.get("id")) for item in added
    ):
        raise malformed(
            TOKENIZER, f"has added_tokens with an id that is not between 0 and {TOKEN_LIMIT}"
        )
    _check_merges(model)
    for charsmap in _found(
        {key: part for key, part in values.items() if key != "model"}, growth.CHARSMAP
    ):
        _check_charsmap(charsmap)
    _check_growth(values)


def _check_growth(values: dict[str, Any]) -> None:
    """Refuse steps that make a text too long: a chain that doubles it takes all memory for a prompt
    of four letters."""
    for factor, most, what in (
        (
            growth.text_growth(values),
            growth.MOST_GROWTH,
            "a normalizer and a pre_tokenizer that make a text",
        ),
        (growth.decoded_growth(values), growth.MOST_DECODED_GROWTH, "a decoder that makes a text"),
        (
            growth.repeats(values),
            growth.MOST_REPEATS,
            "a post_processor that makes a text's tokens",
        ),
    ):
        if factor > most:
            raise malformed(
                TOKENIZER,
                f"has {what} {factor:.3g} times as long, and at most {most:g} are taken; use the "
                "tokenizer.json of the "
                "checkpoint",
                reason="TOKENIZER_GROWS",
            )


def _check_merges(model: dict[str, Any]) -> None:
    """Refuse merges at which the library panics: it cuts the prefix off the second half of each,
    however short."""
    prefix = model.get("continuing_subword_prefix")
    if not prefix:
        return
    merges = model.get("merges") or []
    if not isinstance(prefix, str) or not isinstance(merges, list):
        raise malformed(
            TOKENIZER, "has a continuing_subword_prefix or merges of another kind than texts"
        )
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(halves, list)
            or len(halves) != 2
            or not all(isinstance(half, str) for half in halves)
        ):
            raise malformed(TOKENIZER, "has merges that are not pairs of texts")
        if not halves[1].startswith(prefix):
            raise malformed(
                TOKENIZER, "has a merge whose second half lacks the continuing_subword_prefix"
            )


def _check_charsmap(value: object) -> None:
    """Refuse a map that is cut short: the library allocates as much as its first four bytes say."""
    if value is None:
        return
    data = growth.charsmap_bytes(value)
    if len(data) < 4 or int.from_bytes(data[:4], "little") > len(data) - 4:
        raise malformed(TOKENIZER, f"has a {growth.CHARSMAP} that is shorter than it declares")


def _found(value: object, key: str) -> Iterator[object]:
    """The values under `key`, wherever they stand in a document."""
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


def expert_table_of(values: dict[str, Any]) -> dict[str, list[Any]]:
    """The three arrays of a table that forecasts experts, by name; a node checks their items, by
    its model.

    Raises InvalidArgumentError for one that is missing.
    """
    for part in EXPERT_TABLE_PARTS:
        if not isinstance(values.get(part), list):
            raise malformed(EXPERT_TABLE, f"has no list {part!r}")
    return {part: values[part] for part in EXPERT_TABLE_PARTS}


_CHECKS: dict[str, Callable[[dict[str, Any]], object] | None] = {
    TOKENIZER: _check_tokenizer,
    GENERATION: eos_tokens_of,
    TOKENIZER_SETTINGS: templates_of,
    CHAT_TEMPLATE: None,
    EXPERT_TABLE: expert_table_of,
}
"""The check of each small file; a file without one is any text."""
SMALL_FILES = tuple(_CHECKS)
"""The names of the files that travel with a model."""
