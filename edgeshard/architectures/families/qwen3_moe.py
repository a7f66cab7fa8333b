"""qwen3_moe: qwen3 with experts in all blocks but those that config.json names; one window for
all."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import (
    attention,
    expert_count,
    expert_mlps,
    gated_mlp,
    head_norms,
    linear,
    mixture_style,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows

_EXPERTS = Experts()


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    block = (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | head_norms(shape)
    )
    dense = layer in fields.layer_list("mlp_only_layers", shape.layer_count)
    if dense or (layer + 1) % fields.size("decoder_sparse_step"):
        return block | gated_mlp(shape, fields.size("intermediate_size"))
    count = expert_count(_EXPERTS, fields)
    router = linear("mlp.gate", count, shape.hidden_size)
    return block | router | expert_mlps(shape, count, fields.size("moe_intermediate_size"))


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.layer_list("mlp_only_layers", layer_count)


ARCHITECTURE = Architecture(
    name="qwen3_moe",
    nested={"internvl": "qwen3_moe"},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    },
    flags=("attention_bias", "norm_topk_prob"),
    sizes=("intermediate_size", "moe_intermediate_size", "decoder_sparse_step"),
    checks=(_check,),
    windows=Windows(4096, switch="use_sliding_window"),
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    block=_block,
    library=Library("qwen3_moe", "Qwen3Moe"),
    runs=Fused(mixture_style()),
    gguf=Gguf(("qwen3moe",), config=lambda fields: {"norm_topk_prob": True}),
)
