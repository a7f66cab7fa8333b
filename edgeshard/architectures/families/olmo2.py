"""olmo2: norms behind attention and MLP instead of before them, and over the whole rows of queries and keys."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import attention, gated_mlp, norms
from edgeshard.architectures.record import Architecture, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, "post_attention_layernorm", "post_feedforward_layernorm")
        | norms(shape.attention_heads * shape.head_dim, "self_attn.q_norm")
        | norms(shape.kv_heads * shape.head_dim, "self_attn.k_norm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | gated_mlp(shape, fields.size("intermediate_size"))
    )


ARCHITECTURE = Architecture(
    name="olmo2",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    flags=("attention_bias",),
    block=_block,
    library=Library("olmo2", "Olmo2"),
    runs=Plugged(),
)
