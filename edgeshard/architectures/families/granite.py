"""granite: the Llama kind with multipliers of embeddings, residual branches, attention's scores and logits."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import attention, gated_mlp, norms, scaled_ends
from edgeshard.architectures.record import Architecture, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | gated_mlp(shape, fields.size("intermediate_size"), bias=fields.flag("mlp_bias"))
    )


ARCHITECTURE = Architecture(
    name="granite",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "eos_token_id": 2,
    },
    numbers=("rms_norm_eps", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    block=_block,
    library=Library("granite", "Granite"),
    runs=Plugged(),
    ends=scaled_ends,
)
