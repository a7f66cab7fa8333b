"""mistral: one window for all blocks, 4096 where config.json leaves it out."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import attention, gated_mlp, llama_style, norms
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    return (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape)
        | gated_mlp(shape, fields.size("intermediate_size"))
    )


ARCHITECTURE = Architecture(
    name="mistral",
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 2},
    windows=Windows(default=4096),
    block=_block,
    library=Library("mistral", "Mistral"),
    runs=Fused(llama_style),
)
