"""The reading of a config.json: a model's family and shape, and the refusal of all that would be
run wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from edgeshard.architectures.fields import ConfigFields, refuse, shown
from edgeshard.architectures.limits import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY
from edgeshard.architectures.parts import check_experts, even_split, expert_count
from edgeshard.architectures.record import Architecture
from edgeshard.architectures.registry import ARCHITECTURES, NESTED, REFUSED, find
from edgeshard.architectures.rope import Rotation
from edgeshard.architectures.shape import ModelShape
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.models.dtypes import STORED_FORMATS, ExpertWidths, IntegerFormat, Quantisation

STORED_AS = "edgeshard_stored_as"
"""The key that EdgeShard adds to the config.json of a model whose weights it stores as small
integers."""
FORMATS = "edgeshard_formats"
"""Key of the formats of tensors that are stored as small integers, if they differ: lists of names
by format. A name is canonical, with `*` for the number of an expert."""
EXPERT_WIDTHS = "edgeshard_expert_widths"
"""The key for the bits of each expert if the weights become small integers:
`ExpertWidths.layers`."""

CONTEXT = "edgeshard_context"
"""The key that EdgeShard adds for the tokens of a deployment's longest request (`for_context`)."""

_LONGEST_COMPARED = 40
"""Characters of a model_type that are compared with the names of families."""
_NEAR = 0.75
"""The least similarity (`difflib`) of two names that may be confused."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The config.json of a model that runs: its family's record, the fields of its decoder, its
    shape.

    `context` is the longest request's: the model's limit, or a deployment's own.
    """

    architecture: Architecture
    fields: ConfigFields
    shape: ModelShape
    context: int

    @property
    def short_context(self) -> int:
        """The longest context for which the rotary embedding is another one than beyond it; 0 for
        models with one."""
        rope = self.architecture.rope
        return 0 if rope is None else rope.trained_context(self.fields)

    def windows(self) -> tuple[int, ...]:
        """The most positions that a token of each block sees, its own included; 0 for all positions
        before it."""
        rule, layers = self.architecture.windows, self.shape.layer_count
        return (0,) * layers if rule is None else rule.sizes(self.fields, layers)

    def rotations(self) -> dict[str, Rotation]:
        """The rotary embedding of each layer type, or of all layers under "", of a family that has
        any.

        Layers of one type have heads of one width.
        """
        rope = self.architecture.rope
        windows = self.architecture.windows
        shape = self.shape
        assert rope is not None
        widths: dict[str, int] = {}
        if rope.by_layer_type and windows is not None:
            types = windows.layer_types(self.fields, shape.layer_count)
            widths = {kind: shape.kv_of(layer).head_dim for layer, kind in enumerate(types)}
        return rope.rotations(self.fields, shape.head_dim, shape.max_context, self.context, widths)


def parse_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that `config` (a decoded config.json) describes.

    Raises UnsupportedModelError, its `field` the key at fault, for an architecture or an option
    that is not run, and for a key that is missing or ill-typed.
    """
    return read_config(config).shape


def read_config(config: Mapping[str, Any]) -> Decoder:
    """The family, the fields and the shape of the decoder in `config`. Raises as `parse_config`
    does."""
    _check_general(config)
    architecture, fields = decoder_fields(config)
    _check_fields(architecture, fields)
    shape = _shape(architecture, config, fields)
    if architecture.windows is not None:
        architecture.windows.check(fields, shape.layer_count)
    if architecture.rope is not None:
        architecture.rope.check(fields)
    if architecture.experts is not None:
        check_experts(architecture.experts, fields, shape.layer_count)
    for check in architecture.checks:
        check(fields, shape.layer_count)
    if architecture.kv is not None:
        heads = (architecture.kv(fields, shape, layer) for layer in range(shape.layer_count))
        shape = replace(shape, kv=tuple(heads))
    if architecture.states is not None:
        states = (architecture.states(fields, shape, layer) for layer in range(shape.layer_count))
        shape = replace(shape, states=tuple(states))
    return Decoder(architecture, fields, shape, _context(config, shape))


def for_context(config: Mapping[str, Any], max_context: int) -> Mapping[str, Any]:
    """`config` as a deployment with this `max_context` (0: the model's) runs it.

    The shape is the same. Only rotary embeddings can depend on it. Raises as `parse_config` does.
    """
    decoder = read_config(config)
    if not max_context or not decoder.short_context:
        return config
    return {**config, CONTEXT: min(max_context, decoder.shape.max_context)}


def context_note(config: Mapping[str, Any], max_context: int) -> str:
    """The rotary factors that a deployment with this `max_context` (0: the model's) has; "" for
    models with one set."""
    decoder = read_config(for_context(config, max_context))
    trained = decoder.short_context
    if not trained:
        return ""
    if decoder.context <= trained:
        return (
            f"Rotary factors: short, because the context of {decoder.context} tokens is at most "
            f"{trained}."
        )
    return (
        f"Rotary factors: long, because the context of {decoder.context} tokens is beyond "
        f"{trained}; with max_context "
        f"{trained} or less they are short."
    )


def _context(config: Mapping[str, Any], shape: ModelShape) -> int:
    value = config.get(CONTEXT)
    if value is None:
        return shape.max_context
    if type(value) is not int or not 0 < value <= shape.max_context:
        raise refuse(CONTEXT, f"is {shown(value)}; it must be between 1 and {shape.max_context}")
    return value


def decoder_fields(config: Mapping[str, Any]) -> tuple[Architecture, ConfigFields]:
    """The record of the family, and the decoder's part of a config.json, which may be nested."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise refuse("model_type", "is missing; use the complete config.json of the checkpoint")
    if model_type in REFUSED:
        raise refuse(
            "model_type", f"{shown(model_type)} is not supported: it {REFUSED[model_type]}"
        )
    architecture = find(model_type)
    has_decoder = architecture is not None and model_type in architecture.own_types
    wrapped = NESTED.get(model_type)
    if wrapped is not None and not (has_decoder and config.get("text_config") is None):
        return _nested_fields(model_type, wrapped, config.get("text_config"))
    if architecture is None or not has_decoder:
        raise _unknown(model_type, bool(config.get("auto_map")))
    return architecture, _fields(architecture, config)


def _unknown(model_type: str, has_code: bool) -> UnsupportedModelError:
    """The error for a model_type that no family has."""
    why = f"{shown(model_type)} is not supported"
    near = get_close_matches(model_type[:_LONGEST_COMPARED], ARCHITECTURES, n=3, cutoff=_NEAR)
    if near:
        why += f"; families with near names are {', '.join(near)}"
    why += f"; docs/models.md lists the {len(ARCHITECTURES)} families that run"
    if has_code:
        why += "; the code that its auto_map names is never run"
    return refuse("model_type", why)


def _nested_fields(
    model_type: str, wrapped: Mapping[str, Architecture], nested: object
) -> tuple[Architecture, ConfigFields]:
    """As `decoder_fields`, of a config.json that nests one of the `wrapped` decoders."""
    if not isinstance(nested, Mapping):
        raise refuse(
            "text_config", f"is missing or not an object; a {model_type} checkpoint needs it"
        )
    nested_type = nested.get("model_type", next(iter(wrapped)) if len(wrapped) == 1 else None)
    if not isinstance(nested_type, str) or nested_type not in wrapped:
        raise refuse(
            "text_config.model_type", f"is {shown(nested_type)}; it must be {' or '.join(wrapped)}"
        )
    record = wrapped[nested_type]
    defaults = {**record.defaults, **record.nested_defaults}
    return record, ConfigFields(record.current(nested), "text_config.", defaults, record.name)


def _fields(architecture: Architecture, values: Mapping[str, Any]) -> ConfigFields:
    return ConfigFields(architecture.current(values), "", architecture.defaults, architecture.name)


def is_tied(architecture: Architecture, config: Mapping[str, Any], fields: ConfigFields) -> bool:
    """Whether the embedding is the LM head too. A nested config may have the key at either level.

    If the levels differ, a false one at the top counts, as in transformers, unless the family's
    `either_ties` has the model_type. A true one at the top is refused: it would drop an LM head
    that the checkpoint may have.
    """
    key = "tie_word_embeddings"
    inner, outer = fields.flag(key), ConfigFields(config).flag(key, fields.flag(key))
    if outer == inner or not fields.given(key):
        return outer
    if outer:
        raise refuse(key, "differs from the one in text_config; make the two agree")
    return config.get("model_type") in architecture.either_ties


def _check_general(config: Mapping[str, Any]) -> None:
    for part, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        if not isinstance(part, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                raise refuse(prefix + key, "is given; use the checkpoint that is not quantised")
        for key in ("is_encoder_decoder", "add_cross_attention"):
            if part.get(key):
                raise refuse(prefix + key, "is set; EdgeShard runs decoder-only models")


def _check_fields(architecture: Architecture, fields: ConfigFields) -> None:
    fields.choice(architecture.activation, architecture.activations)
    for key in architecture.sizes:
        fields.size(key)
    for key in architecture.numbers:
        fields.number(key)
    for key in architecture.flags:
        fields.flag(key)
    for key, why in architecture.refused.items():
        value = fields.values.get(key)
        if value is not None and value is not False:  # a 0 is neither
            raise fields.refuse(key, why)


def _shape(
    architecture: Architecture, config: Mapping[str, Any], fields: ConfigFields
) -> ModelShape:
    keys = architecture.keys
    hidden, heads = fields.size(keys.hidden), fields.size(keys.heads)
    layer_count = fields.size(keys.layers, most=MAX_LAYERS)  # before anything is listed by layer
    kv_heads = fields.size(keys.kv_heads)
    even_split(fields, keys.heads, heads, keys.kv_heads, kv_heads)
    vocab = fields.size("vocab_size", most=MAX_VOCABULARY)
    return ModelShape(
        architecture=architecture.name,
        layer_count=layer_count,
        hidden_size=hidden,
        vocab_size=vocab,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(architecture, fields, hidden, heads),
        max_context=fields.size(keys.context, most=MAX_CONTEXT),
        tied=is_tied(architecture, config, fields),
        eos_tokens=_eos_tokens(config, fields, vocab),
        frame_width=hidden,
        stored_as=_stored_as(architecture, config),
        formats=_formats(config),
        expert_widths=_expert_widths(architecture, config, fields, layer_count),
    )


def _stored_as(architecture: Architecture, config: Mapping[str, Any]) -> Quantisation | None:
    value = config.get(STORED_AS)
    if config.get(FORMATS) is not None:
        if value is not None:
            raise refuse(STORED_AS, f"is given, but {FORMATS} has a format for each tensor")
        if not architecture.quantises:
            raise refuse(FORMATS, f"is given, but {architecture.name} runs with whole weights only")
        return Quantisation.STORED
    if value is None:
        return None
    if (
        not isinstance(value, str)
        or value not in list(Quantisation)
        or value == Quantisation.STORED
    ):
        raise refuse(STORED_AS, f"is {shown(value)}; it must be one of {', '.join(Quantisation)}")
    if not architecture.quantises:
        raise refuse(STORED_AS, f"is given, but {architecture.name} runs with whole weights only")
    return Quantisation(value)


def _formats(config: Mapping[str, Any]) -> Mapping[str, IntegerFormat]:
    """The format of each tensor, by name as in `FORMATS`; empty without the key."""
    value = config.get(FORMATS)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(FORMATS, f"is {shown(value)}; it must be an object of names by format")
    formats: dict[str, IntegerFormat] = {}
    for text, names in value.items():
        if text not in STORED_FORMATS:
            raise refuse(
                FORMATS,
                f"has the format {shown(text)}; it must be one of {', '.join(STORED_FORMATS)}",
            )
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise refuse(FORMATS, f"has {shown(names)} for {text}; it must be a list of names")
        for name in names:
            if name in formats:
                raise refuse(FORMATS, f"has two formats for {shown(name)}")
            formats[name] = IntegerFormat(text)
    return formats


def _expert_widths(
    architecture: Architecture, config: Mapping[str, Any], fields: ConfigFields, layer_count: int
) -> ExpertWidths | None:
    """The widths of each layer's experts: a text with a digit for each of them, or an empty one."""
    value = config.get(EXPERT_WIDTHS)
    if value is None:
        return None
    if (
        architecture.experts is None
        or not architecture.quantises
        or not architecture.has_expert_modules
    ):
        raise refuse(
            EXPERT_WIDTHS,
            f"is given, but {architecture.name} has no experts that are kept one by one",
        )
    count = expert_count(architecture.experts, fields)
    if not isinstance(value, list) or len(value) != layer_count:
        raise refuse(EXPERT_WIDTHS, f"must be a list of {layer_count} texts, one for each layer")
    for text in value:
        if not isinstance(text, str) or len(text) not in (0, count) or not set(text) <= set("248"):
            raise refuse(
                EXPERT_WIDTHS,
                f"has {shown(text)}; a layer has {count} digits, each 2, 4 or 8, or none",
            )
    return ExpertWidths(tuple(value))


def _head_dim(architecture: Architecture, fields: ConfigFields, hidden: int, heads: int) -> int:
    keys = architecture.keys
    if keys.head_dim and (fields.given(keys.head_dim) or keys.head_dim in architecture.defaults):
        head_dim = fields.size(keys.head_dim)
    else:
        head_dim = even_split(fields, keys.hidden, hidden, keys.heads, heads)
    if heads * head_dim > MAX_SIZE:
        raise fields.refuse(
            keys.heads, f"is {heads}, of {head_dim} numbers each; together they may have {MAX_SIZE}"
        )
    if architecture.rope is not None and head_dim % 2:
        raise fields.refuse(
            keys.head_dim, f"is {head_dim}; a rotary embedding needs an even number"
        )
    return head_dim


def named_eos_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of tokens that end an answer which config.json itself names, without its family's
    default.

    Raises as `parse_config` does.
    """
    fields = decoder_fields(config)[1]
    return _eos_ids(
        config.get("eos_token_id", fields.values.get("eos_token_id")), fields.size("vocab_size")
    )


def _eos_tokens(
    config: Mapping[str, Any], fields: ConfigFields, vocab_size: int
) -> tuple[int, ...]:
    default = fields.values.get("eos_token_id", fields.defaults.get("eos_token_id"))
    return _eos_ids(config.get("eos_token_id", default), vocab_size)


def _eos_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    items: Iterable[Any] = (
        value if isinstance(value, list | tuple) else [] if value is None else [value]
    )
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise refuse(
                "eos_token_id", f"is {shown(value)}; it must be a token id, a list of them or null"
            )
    # An id beyond the vocabulary, as a class default in a small model, can never be sampled.
    return tuple(item for item in items if item < vocab_size)
