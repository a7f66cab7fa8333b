"""qwen3_5_moe, its text part only: qwen3_5 with experts in every block, beside an MLP that every
token uses.

Published files have all experts of a block in two tensors; files with a tensor for each expert's
matrix are read, too.
"""

from __future__ import annotations

from edgeshard.architectures import gated_delta
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import (
    expert_count,
    expert_mlps,
    fixed_values,
    gated_mlp,
    joined_mlps,
    linear,
)
from edgeshard.architectures.record import Architecture, Experts, Fused, Library, Shapes
from edgeshard.architectures.rope import SECTION_KEYS, Rope
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts(count=("num_experts",), joined=joined_mlps())


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    count = expert_count(_EXPERTS, fields)
    return (
        gated_delta.mixer(fields, shape, layer, joined=False)
        | linear("mlp.gate", count, shape.hidden_size)
        | expert_mlps(shape, count, fields.size("moe_intermediate_size"))
        | gated_mlp(shape, fields.size("shared_expert_intermediate_size"), path="mlp.shared_expert")
        | linear("mlp.shared_expert_gate", 1, shape.hidden_size)
    )


ARCHITECTURE = Architecture(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text",),
    nested={"qwen3_5_moe": "qwen3_5_moe_text"},
    defaults=gated_delta.DEFAULTS
    | {
        "vocab_size": 248_320,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "partial_rotary_factor": 0.25,
    },
    flags=("attention_bias", gated_delta.TILED),
    sizes=("moe_intermediate_size", "shared_expert_intermediate_size", *gated_delta.SIZES),
    checks=(
        gated_delta.check,
        fixed_values(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    ),
    rope=Rope(partial=True, unread=SECTION_KEYS),
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    block=_block,
    kv=gated_delta.kv,
    states=gated_delta.states,
    library=Library(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        config="Qwen3_5MoeTextConfig",
        rotary="Qwen3_5MoeTextRotaryEmbedding",
    ),
    runs=Fused(gated_delta.mixture_style, float32=gated_delta.FLOAT32),
    ends=gated_delta.ends,
    whole=gated_delta.WHOLE,
    gguf=Gguf(
        ("qwen35moe",),
        unit_norms=gated_delta.UNIT_NORMS,
        config=gated_delta.gguf(gated_delta.TILED),
    ),
)
