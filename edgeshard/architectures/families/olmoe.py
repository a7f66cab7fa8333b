"""olmoe: experts in every block, norms over the whole rows of queries and keys."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    attention,
    even_split,
    expert_count,
    expert_mlps,
    linear,
    norms,
    row_norms,
)
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts()


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    count, bias = expert_count(_EXPERTS, fields), fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, *LLAMA_NORMS)
        | attention(shape, input_bias=bias, output_bias=bias)
        | row_norms(shape)
        | linear("mlp.gate", count, shape.hidden_size)
        | expert_mlps(shape, count, fields.size("intermediate_size"))
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.optional_number("clip_qkv")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    own = even_split(fields, "hidden_size", hidden, "num_attention_heads", heads)
    if (head_dim := fields.size("head_dim", own)) != own:
        raise fields.refuse(
            "head_dim", f"is {head_dim}; it must be hidden_size / num_attention_heads, {own}"
        )


ARCHITECTURE = Architecture(
    name="olmoe",
    defaults={
        "num_attention_heads": 16,
        "num_key_value_heads": "num_attention_heads",
        "vocab_size": 50_304,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "eos_token_id": 50_279,
    },
    flags=("attention_bias", "norm_topk_prob"),
    checks=(_check,),
    experts=_EXPERTS,
    block=_block,
    library=Library("olmoe", "Olmoe"),
    runs=Plugged(experts="mlp.experts"),
    gguf=Gguf(),
)
