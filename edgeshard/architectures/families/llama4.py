"""llama4, its text part only: blocks with a rotary embedding attend within chunks of positions,
others to all of them and without an embedding. Experts in all blocks or in some, beside an MLP that
every token uses.

Experts are stored with the matrices transposed, rows of gate and up one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.limits import CHUNK_MULTIPLE, MAX_CONTEXT, MAX_LAYERS
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    TRANSPOSED_RENAMES,
    attention,
    expert_count,
    gated_mlp,
    joined_transposed,
    linear,
    norms,
    transposed_mlps,
)
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import FULL

_PATH = "feed_forward.experts"
_EXPERTS = Experts(count=("num_local_experts",), joined=joined_transposed(_PATH), transposed=True)
_CHUNKED = "chunked_attention"
_TUNING = "attn_temperature_tuning"


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with the lists by layer that transformers' class makes of intervals, where files
    leave them out."""
    config = dict(values)
    layers = config.get("num_hidden_layers")
    count = min(layers, MAX_LAYERS) if type(layers) is int else 0
    interval = config.get("no_rope_layer_interval", 4)
    step = config.get("interleave_moe_layer_step", 1)
    if not config.get("no_rope_layers") and type(interval) is int and interval > 0:
        config["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in range(count)]
    if config.get("moe_layers") is None and type(step) is int and step > 0:
        config["moe_layers"] = list(range(step - 1, count, step))
    if config.get("layer_types") is None and isinstance(config.get("no_rope_layers"), list):
        config["layer_types"] = [
            _CHUNKED if rotates else FULL for rotates in config["no_rope_layers"]
        ]
    if type(config.get(_TUNING)) is int:  # as older files have it
        config[_TUNING] = bool(config[_TUNING])
    return config


def _chunk(fields: ConfigFields, layer: int) -> int:
    chunked = fields.values["layer_types"][layer] == _CHUNKED
    return fields.size("attention_chunk_size", most=MAX_CONTEXT) if chunked else 0


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias, hidden = fields.flag("attention_bias"), shape.hidden_size
    block = norms(hidden, *LLAMA_NORMS) | attention(shape, input_bias=bias, output_bias=bias)
    if layer not in fields.values["moe_layers"]:
        return block | gated_mlp(shape, fields.size("intermediate_size_mlp"), path="feed_forward")
    count, inner = expert_count(_EXPERTS, fields), fields.size("intermediate_size")
    return (
        block
        | linear("feed_forward.router", count, hidden)
        | transposed_mlps(shape, count, inner, experts=_PATH)
        | gated_mlp(shape, inner, path="feed_forward.shared_expert")
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    rotates, types = fields.values.get("no_rope_layers"), fields.values.get("layer_types")
    if (
        not isinstance(rotates, list | tuple)
        or len(rotates) != layer_count
        or any(one not in (0, 1) for one in rotates)
    ):
        raise fields.refuse(
            "no_rope_layers", f"must have 1 or 0 for each of the {layer_count} layers"
        )
    if (
        not isinstance(types, list | tuple)
        or len(types) != layer_count
        or any(kind not in (_CHUNKED, FULL) for kind in types)
    ):
        raise fields.refuse(
            "layer_types", f"must name {_CHUNKED} or {FULL} for each of the {layer_count} layers"
        )
    if (
        _CHUNKED in types
        and (chunk := fields.size("attention_chunk_size", most=MAX_CONTEXT)) % CHUNK_MULTIPLE
    ):
        raise fields.refuse(
            "attention_chunk_size", f"is {chunk}; it must be a multiple of {CHUNK_MULTIPLE}"
        )
    for key in ("no_rope_layer_interval", "interleave_moe_layer_step"):
        fields.size(key)
    fields.layer_list("moe_layers", layer_count)


_WITHOUT_HEAD_NORMS = 128


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The widths; norms of heads, which no GGUF file has: llama.cpp knows the model without by its
    experts."""
    return {
        "intermediate_size": fields.size("expert_feed_forward_length"),
        "intermediate_size_mlp": fields.size("feed_forward_length"),
        "use_qk_norm": fields.size("expert_count") != _WITHOUT_HEAD_NORMS,
    }


ARCHITECTURE = Architecture(
    name="llama4",
    model_types=("llama4_text",),
    nested={"llama4": "llama4_text"},
    current=_current,
    defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        _TUNING: True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "eos_token_id": 2,
    },
    flags=("attention_bias", "use_qk_norm", _TUNING),
    sizes=("intermediate_size", "intermediate_size_mlp", "floor_scale"),
    numbers=("rms_norm_eps", "attn_scale"),
    checks=(_check,),
    chunks=_chunk,
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    block=_block,
    library=Library("llama4", "Llama4Text"),
    runs=Plugged(
        renames=TRANSPOSED_RENAMES,
        experts=_PATH,
        mixers={"self_attn": "llama4_attention", "feed_forward": "llama4_experts"},
    ),
    whole=r"router\.weight$",
    gguf=Gguf(config=_gguf),
)
