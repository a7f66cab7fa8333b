"""Shared parts of families with short convolutions: their layers' types, tensors, states and
checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.limits import MAX_LAYERS
from edgeshard.architectures.parts import linear, norms
from edgeshard.architectures.record import Ends, Shapes
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.architectures.windows import FULL
from edgeshard.domain.models.model import Part

CONVOLUTION = "conv"
MIXERS = {"conv": "short_convolution"}
DEFAULTS = {
    "vocab_size": 65_536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "hidden_act": "silu",
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
FINAL_NORM = "embedding_norm.weight"
OUTER_NAMES = {FINAL_NORM: Part.HEAD}
_NAMES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
_WIDTHS = ("block_dim", "conv_dim", "conv_dim_out")
_INDICES = "full_attn_idxs"


def current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values under the keys of transformers' class, if older files have others; the older ones
    win, as there."""
    config = {key: value for key, value in values.items() if key not in _NAMES}
    config |= {
        _NAMES[key]: value for key, value in values.items() if key in _NAMES and value is not None
    }
    layers, attending = config.get("num_hidden_layers"), config.get(_INDICES)
    if config.get("layer_types") is None and isinstance(attending, list) and type(layers) is int:
        types = [
            FULL if layer in attending else CONVOLUTION for layer in range(min(layers, MAX_LAYERS))
        ]
        config["layer_types"] = types
    return config


def is_convolution(fields: ConfigFields, layer: int) -> bool:
    """Whether the layer of this index has a convolution instead of attention."""
    return bool(fields.values["layer_types"][layer] == CONVOLUTION)


def kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    return (
        KvHeads(0, 0) if is_convolution(fields, layer) else KvHeads(shape.kv_heads, shape.head_dim)
    )


def states(fields: ConfigFields, shape: ModelShape, layer: int) -> tuple[StateSize, ...]:
    """The convolution's last inputs."""
    if not is_convolution(fields, layer):
        return ()
    return (StateSize((fields.size("conv_L_cache") - 1, shape.hidden_size)),)


def mixer(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    """A layer's norms with its attention or its convolution."""
    hidden, bias = shape.hidden_size, fields.flag("conv_bias")
    block = norms(hidden, "operator_norm", "ffn_norm")
    if not is_convolution(fields, layer):
        queries, keys = shape.attention_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return (
            block
            | linear("self_attn.q_proj", queries, hidden)
            | linear("self_attn.k_proj", keys, hidden)
            | linear("self_attn.v_proj", keys, hidden)
            | linear("self_attn.out_proj", hidden, queries)
            | norms(shape.head_dim, "self_attn.q_layernorm", "self_attn.k_layernorm")
        )
    block |= linear("conv.in_proj", 3 * hidden, hidden, bias) | linear(
        "conv.out_proj", hidden, hidden, bias
    )
    block |= {"conv.conv.weight": (hidden, 1, fields.size("conv_L_cache"))}
    return block | {"conv.conv.bias": (hidden,)} if bias else block


def mlp(shape: ModelShape, inner: int) -> Shapes:
    """Tensors of w2(silu(w1(x)) * w3(x)), `inner` numbers wide inside."""
    inputs = linear("feed_forward.w1", inner, shape.hidden_size) | linear(
        "feed_forward.w3", inner, shape.hidden_size
    )
    return inputs | linear("feed_forward.w2", shape.hidden_size, inner)


def outer(fields: ConfigFields, shape: ModelShape) -> Shapes:
    return {FINAL_NORM: (shape.hidden_size,)}


def ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    return Ends(fields.number("norm_eps"))


def check(fields: ConfigFields, layer_count: int) -> None:
    types = fields.values.get("layer_types")
    if (
        not isinstance(types, list | tuple)
        or len(types) != layer_count
        or any(kind not in (CONVOLUTION, FULL) for kind in types)
    ):
        why = f"must name {CONVOLUTION} or {FULL} for each of the {layer_count} layers"
        raise fields.refuse("layer_types", why)
    attending = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    if (
        fields.given(_INDICES)
        and tuple(sorted(fields.layer_list(_INDICES, layer_count))) != attending
    ):
        raise fields.refuse(
            _INDICES, f"differs from the layers with {FULL} in layer_types; make them agree"
        )
    hidden = fields.size("hidden_size")
    for key in _WIDTHS:
        if (width := fields.size(key, hidden)) != hidden:
            raise fields.refuse(key, f"is {width}; it must be hidden_size {hidden}")
    if fields.size("conv_L_cache") < 2:
        raise fields.refuse("conv_L_cache", "is 1; it must be 2 or more")
