"""ernie4_5_moe: ernie4_5 with experts in some blocks, beside an MLP that every token uses; a bias
corrects their choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    attention,
    expert_count,
    expert_mlps,
    fixed_values,
    gated_mlp,
    linear,
    never_null,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts(count=("moe_num_experts",), top_k="moe_k")
_COUNTS = (
    "num_key_value_heads",
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
)
_NAMES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {_NAMES.get(key, key): value for key, value in values.items()}


def _mixture_layers(fields: ConfigFields, layer_count: int) -> range:
    """The layers with experts."""
    first, interval = fields.count("moe_layer_start_index"), fields.size("moe_layer_interval")
    end = fields.values.get("moe_layer_end_index")
    last = layer_count - 1 if end in (None, -1) else fields.count("moe_layer_end_index")
    return range(
        -(-(first + 1) // interval) * interval - 1, min(last, layer_count - 1) + 1, interval
    )


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    block = norms(hidden, *LLAMA_NORMS) | attention(shape)
    if layer not in _mixture_layers(fields, shape.layer_count):
        return block | gated_mlp(shape, fields.size("intermediate_size"))
    count, inner = expert_count(_EXPERTS, fields), fields.size("moe_intermediate_size")
    block |= linear("mlp.gate", count, hidden) | {
        "mlp.moe_statics.e_score_correction_bias": (1, count)
    }
    block |= expert_mlps(shape, count, inner)
    if shared := fields.count("moe_num_shared_experts"):
        block |= gated_mlp(shape, inner * shared, path="mlp.shared_experts")
    return block


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count("moe_num_shared_experts")
    _mixture_layers(fields, layer_count)


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The layers with experts: the first of them, their distance and the last."""
    mixtures = [
        layer for layer, mixture in enumerate(fields.layers_with("ffn_gate_inp.weight")) if mixture
    ]
    first = mixtures[0] if mixtures else 0
    interval = mixtures[1] - first if len(mixtures) > 1 else 1
    end = mixtures[-1] if mixtures else 0
    return {
        "moe_layer_start_index": first,
        "moe_layer_interval": interval,
        "moe_layer_end_index": end,
    }


ARCHITECTURE = Architecture(
    name="ernie4_5_moe",
    current=_current,
    defaults={
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
        "eos_token_id": 2,
    },
    flags=(),
    refused={"use_bias": "is set: the LM head would have a bias, which EdgeShard does not run"},
    sizes=("intermediate_size", "moe_intermediate_size"),
    numbers=("rms_norm_eps", "moe_norm_min"),
    checks=(never_null(*_COUNTS), _check, fixed_values(moe_gate="topk")),
    experts=_EXPERTS,
    block=_block,
    library=Library("ernie4_5_moe", "Ernie4_5_Moe"),
    runs=Plugged(
        renames=((r"^mlp\.moe_statics\.", "mlp.gate.moe_statics."),),
        experts="mlp.experts",
        float32=r"mlp\.gate\.(weight$|moe_statics\.)",
    ),
    whole=r"gate\.weight$|e_score_correction_bias$",
    gguf=Gguf(("ernie4_5-moe",), config=_gguf),
)
