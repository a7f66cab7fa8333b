"""Shared parts of families with gated delta layers: their layers' types, tensors, states and
checks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import GgufFields, attending, ssm_head
from edgeshard.architectures.limits import MAX_SIZE
from edgeshard.architectures.parts import (
    attention,
    even_split,
    head_norms,
    linear,
    llama_style,
    norms,
)
from edgeshard.architectures.record import BlockStyle, Ends, Routing, Shapes
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.architectures.windows import FULL

LINEAR = "linear_attention"
FLOAT32 = r"(A_log|dt_bias)$"
WHOLE = r"(gate|in_proj_(a|b|ba))\.weight$"
"""The weights that open and decay a state are not quantised; neither is a router."""
APART = "edgeshard_inputs_apart"
"""The flag of a model whose queries, keys and values have another tensor than the gates of the
output, as in GGUF."""
TILED = "edgeshard_heads_tiled"
"""The flag of a model whose value heads take the key heads in turn, as in GGUF, instead of some
after one another."""
UNIT_NORMS = r"(?<!linear_attn\.)norm\.weight$"
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
SIZES = (*(key for key in DEFAULTS if key.startswith("linear_")), "full_attention_interval")


def is_linear(fields: ConfigFields, layer: int) -> bool:
    """Whether the layer of this index has the gated delta rule instead of attention."""
    types = fields.values.get("layer_types")
    if types is not None:
        return bool(types[layer] == LINEAR)
    return (layer + 1) % fields.size("full_attention_interval") != 0


def widths(fields: ConfigFields) -> tuple[int, int]:
    """The widths of all keys and of all values of a token."""
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    return keys, fields.size("linear_num_value_heads") * fields.size("linear_value_head_dim")


def kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    return KvHeads(0, 0) if is_linear(fields, layer) else KvHeads(shape.kv_heads, shape.head_dim)


def states(fields: ConfigFields, shape: ModelShape, layer: int) -> tuple[StateSize, ...]:
    """The convolution's last inputs, and a matrix for each value head."""
    if not is_linear(fields, layer):
        return ()
    keys, values = widths(fields)
    tail = StateSize((fields.size("linear_conv_kernel_dim") - 1, 2 * keys + values))
    heads = fields.size("linear_num_value_heads")
    matrix = (heads, fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim"))
    return tail, StateSize(matrix, float32=True)


def mixer(fields: ConfigFields, shape: ModelShape, layer: int, joined: bool) -> Shapes:
    """A layer's norms with its attention, whose queries have a gate, or with its gated delta rule.
    The inputs of the rule are `joined` in two projections or separate in four."""
    block = norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
    hidden = shape.hidden_size
    if not is_linear(fields, layer):
        bias = fields.flag("attention_bias")
        queries = linear(
            "self_attn.q_proj", 2 * shape.attention_heads * shape.head_dim, hidden, bias
        )
        return (
            block
            | attention(shape, input_bias=bias, output_bias=bias)
            | head_norms(shape)
            | queries
        )
    (keys, values), heads = widths(fields), fields.size("linear_num_value_heads")
    if joined and not fields.flag(APART):
        inputs = {"qkvz": 2 * keys + 2 * values}
    else:
        inputs = {"qkv": 2 * keys + values, "z": values}
    inputs |= {"ba": 2 * heads} if joined else {"b": heads, "a": heads}
    for name, width in inputs.items():
        block |= linear(f"linear_attn.in_proj_{name}", width, hidden)
    return (
        block
        | {
            "linear_attn.conv1d.weight": (
                2 * keys + values,
                1,
                fields.size("linear_conv_kernel_dim"),
            ),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
        }
        | norms(fields.size("linear_value_head_dim"), "linear_attn.norm")
        | linear("linear_attn.out_proj", hidden, values)
    )


def style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    rotary = None if is_linear(fields, layer) else ""
    tiled = fields.flag(TILED)
    return replace(
        llama_style(fields, shape, layer), rotary=rotary, unit_offset=True, tiled_heads=tiled
    )


def mixture_style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    normalised = "norm_topk_prob" not in fields.defaults or fields.flag("norm_topk_prob")
    routing = Routing(fields.size("num_experts_per_tok"), normalised)
    return replace(style(fields, shape, layer), routing=routing)


def ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    return Ends(fields.number("rms_norm_eps"), unit_offset=True)


def gguf(*flags: str) -> Callable[[GgufFields], dict[str, Any]]:
    """The keys of config.json for a GGUF file of a family that sets these flags."""

    def config(fields: GgufFields) -> dict[str, Any]:
        kinds = attending(fields, FULL, LINEAR)
        return {
            "layer_types": kinds,
            "linear_value_head_dim": ssm_head(fields),
            **dict.fromkeys(flags, True),
        }

    return config


def check(fields: ConfigFields, layer_count: int) -> None:
    types = fields.values.get("layer_types")
    if types is not None and (
        not isinstance(types, list | tuple)
        or len(types) != layer_count
        or any(kind not in (LINEAR, FULL) for kind in types)
    ):
        why = f"must name {LINEAR} or {FULL} for each of the {layer_count} layers"
        raise fields.refuse("layer_types", why)
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    even_split(fields, "linear_num_value_heads", values, "linear_num_key_heads", keys)
    fields.choice("hidden_act", frozenset({"silu", "swish"}))
    if sum(widths(fields)) > MAX_SIZE:
        raise fields.refuse(
            "linear_num_value_heads",
            f"is {values}; keys and values of a token may have {MAX_SIZE} numbers together",
        )
    if fields.size("linear_conv_kernel_dim") < 2:
        raise fields.refuse("linear_conv_kernel_dim", "is 1; it must be 2 or more")
