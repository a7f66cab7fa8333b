"""qwen2_moe: qwen2 with experts, and one more that every token uses, in all blocks but those
config.json names."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import (
    attention,
    expert_count,
    expert_mlps,
    gated_mlp,
    linear,
    mixture_style,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows

_EXPERTS = Experts()


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    block = norms(hidden, "input_layernorm", "post_attention_layernorm") | attention(
        shape, input_bias=fields.flag("qkv_bias")
    )
    dense = layer in fields.layer_list("mlp_only_layers", shape.layer_count)
    if dense or (layer + 1) % fields.size("decoder_sparse_step"):
        return block | gated_mlp(shape, fields.size("intermediate_size"))
    count = expert_count(_EXPERTS, fields)
    return (
        block
        | linear("mlp.gate", count, hidden)
        | expert_mlps(shape, count, fields.size("moe_intermediate_size"))
        | gated_mlp(shape, fields.size("shared_expert_intermediate_size"), path="mlp.shared_expert")
        | linear("mlp.shared_expert_gate", 1, hidden)
    )


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    end = fields.count("max_window_layers", 28)
    return [layer % 2 == 0 and layer < end for layer in range(layer_count)]


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.layer_list("mlp_only_layers", layer_count)


ARCHITECTURE = Architecture(
    name="qwen2_moe",
    defaults={
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "qkv_bias": True,
    },
    flags=("norm_topk_prob", "qkv_bias"),
    sizes=(
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "decoder_sparse_step",
    ),
    checks=(_check,),
    windows=Windows(4096, switch="use_sliding_window", sliding=_sliding),
    experts=_EXPERTS,
    block=_block,
    library=Library("qwen2_moe", "Qwen2Moe"),
    runs=Fused(mixture_style()),
    gguf=Gguf(("qwen2moe",)),
)
