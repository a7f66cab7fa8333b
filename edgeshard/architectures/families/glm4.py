"""glm4: four norms a block, gate and up in one tensor, a rotary embedding of neighbours in a part
of each head."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import attention, linear, norms
from edgeshard.architectures.record import Architecture, Library, Plugged, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape

_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, inner = shape.hidden_size, fields.size("intermediate_size")
    return (
        norms(hidden, *_NORMS)
        | attention(shape, input_bias=fields.flag("attention_bias"))
        | linear("mlp.gate_up_proj", 2 * inner, hidden)
        | linear("mlp.down_proj", hidden, inner)
    )


ARCHITECTURE = Architecture(
    name="glm4",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "eos_token_id": [151_329, 151_336, 151_338],
    },
    flags=("attention_bias",),
    rope=Rope(partial=True),
    block=_block,
    library=Library("glm4", "Glm4"),
    runs=Plugged(),
    gguf=Gguf(),
)
