"""gemma2: capped scores and logits, every other block with a window, four norms a block that multiply by 1 + weight, a
scaled embedding."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import ACTIVATIONS, attention, even_split, gated_mlp, norms
from edgeshard.architectures.record import Architecture, BlockStyle, Ends, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, all_but_every

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, *_NORMS)
        | attention(shape, input_bias=bias, output_bias=bias)
        | gated_mlp(shape, fields.size("intermediate_size"))
    )


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    return BlockStyle(
        eps=fields.number("rms_norm_eps"),
        scaling=fields.number("query_pre_attn_scalar") ** -0.5,
        activation=fields.choice("hidden_activation", ACTIVATIONS),
        unit_offset=True,
        softcap=fields.optional_number("attn_logit_softcapping"),
    )


def _ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    return Ends(
        eps=fields.number("rms_norm_eps"),
        embedding_scale=shape.hidden_size**0.5,
        rounded=True,
        unit_offset=True,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.optional_number("attn_logit_softcapping")
    fields.optional_number("final_logit_softcapping")
    # transformers asks for it even where head_dim is given.
    even_split(
        fields, "hidden_size", fields.size("hidden_size"), "num_attention_heads", fields.size("num_attention_heads")
    )


ARCHITECTURE = Architecture(
    name="gemma2",
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation="hidden_activation",
    flags=("attention_bias",),
    numbers=("rms_norm_eps", "query_pre_attn_scalar"),
    refused={"use_bidirectional_attention": "is set; EdgeShard runs causal models only"},
    checks=(_check,),
    windows=Windows(4096, sliding=all_but_every(2)),
    block=_block,
    library=Library("gemma2", "Gemma2"),
    runs=Fused(_style),
    ends=_ends,
)
