"""granitemoe: granite with experts in every block, those of a block in two tensors."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.parts import (
    attention,
    expert_count,
    expert_mlps,
    joined_mlps,
    linear,
    multiplied_style,
    never_null,
    norms,
    scaled_ends,
)
from edgeshard.architectures.record import (
    Architecture,
    BlockStyle,
    Experts,
    Fused,
    Library,
    Routing,
    Shapes,
)
from edgeshard.architectures.shape import ModelShape

_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
_PATH = "block_sparse_moe"
_EXPERTS = Experts(
    count=("num_local_experts",),
    joined=joined_mlps(
        f"{_PATH}.experts", f"{_PATH}.input_linear.weight", f"{_PATH}.output_linear.weight"
    ),
)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, inner = shape.hidden_size, fields.size("intermediate_size")
    count, bias = expert_count(_EXPERTS, fields), fields.flag("attention_bias")
    return (
        norms(hidden, "input_layernorm", "post_attention_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | linear(f"{_PATH}.router.layer", count, hidden)
        | expert_mlps(shape, count, inner, f"{_PATH}.experts")
    )


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    return replace(
        multiplied_style(fields, shape, layer), routing=Routing(fields.size("num_experts_per_tok"))
    )


def _is_gguf(fields: GgufFields) -> bool:
    """Whether a GGUF file is of this family: llama.cpp writes granitemoeshared under the same
    name."""
    return not fields.has("ffn_gate_shexp.weight")


ARCHITECTURE = Architecture(
    name="granitemoe",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": 2,
    }
    | dict.fromkeys(_MULTIPLIERS, 1.0),
    flags=("attention_bias",),
    numbers=("rms_norm_eps", *_MULTIPLIERS),
    checks=(never_null(*_MULTIPLIERS),),
    experts=_EXPERTS,
    block=_block,
    library=Library("granitemoe", "GraniteMoe"),
    runs=Fused(
        _style, renames=((rf"^{_PATH}\.router\.layer\.", "mlp.gate."), (rf"^{_PATH}\.", "mlp."))
    ),
    ends=scaled_ends,
    whole=r"router\.layer\.weight$",
    gguf=Gguf(applies=_is_gguf, permuted=True),
)
