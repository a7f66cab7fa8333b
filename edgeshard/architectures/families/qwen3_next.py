"""qwen3_next: three layers in four have a gated delta rule; experts in all blocks but those that
config.json names, and one more that every token uses."""

from __future__ import annotations

from edgeshard.architectures import gated_delta
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import expert_count, expert_mlps, gated_mlp, linear
from edgeshard.architectures.record import Architecture, Experts, Fused, Library, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts(count=("num_experts",))


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = gated_delta.mixer(fields, shape, layer, joined=True)
    dense = layer in fields.layer_list("mlp_only_layers", shape.layer_count)
    if dense or (layer + 1) % fields.size("decoder_sparse_step"):
        return block | gated_mlp(shape, fields.size("intermediate_size"))
    count = expert_count(_EXPERTS, fields)
    return (
        block
        | linear("mlp.gate", count, shape.hidden_size)
        | expert_mlps(shape, count, fields.size("moe_intermediate_size"))
        | gated_mlp(shape, fields.size("shared_expert_intermediate_size"), path="mlp.shared_expert")
        | linear("mlp.shared_expert_gate", 1, shape.hidden_size)
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.layer_list("mlp_only_layers", layer_count)


ARCHITECTURE = Architecture(
    name="qwen3_next",
    defaults=gated_delta.DEFAULTS
    | {
        "vocab_size": 151_936,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "partial_rotary_factor": 0.25,
    },
    flags=("attention_bias", "norm_topk_prob", gated_delta.APART),
    sizes=(
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "decoder_sparse_step",
        *gated_delta.SIZES,
    ),
    checks=(gated_delta.check, _check),
    rope=Rope(partial=True),
    experts=_EXPERTS,
    block=_block,
    kv=gated_delta.kv,
    states=gated_delta.states,
    library=Library("qwen3_next", "Qwen3Next"),
    runs=Fused(gated_delta.mixture_style, float32=gated_delta.FLOAT32),
    ends=gated_delta.ends,
    whole=gated_delta.WHOLE,
    gguf=Gguf(
        ("qwen3next",),
        unit_norms=gated_delta.UNIT_NORMS,
        config=gated_delta.gguf(gated_delta.APART, "norm_topk_prob"),
    ),
)
