"""seed_oss: the Llama kind, with biases of queries, keys and values as a rule; a flag of its own
gives the output one."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    attention,
    gated_mlp,
    llama_style,
    never_null,
    norms,
)
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    input_bias, output_bias = fields.flag("attention_bias"), fields.flag("attention_out_bias")
    return (
        norms(shape.hidden_size, *LLAMA_NORMS)
        | attention(shape, input_bias=input_bias, output_bias=output_bias)
        | gated_mlp(shape, fields.size("intermediate_size"), bias=fields.flag("mlp_bias"))
    )


ARCHITECTURE = Architecture(
    name="seed_oss",
    defaults={
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "eos_token_id": 2,
    },
    flags=("attention_bias", "attention_out_bias", "mlp_bias"),
    checks=(never_null("num_key_value_heads", "head_dim"),),
    block=_block,
    library=Library("seed_oss", "SeedOss"),
    runs=Fused(llama_style),
    gguf=Gguf(),
)
