"""qwen2: biases of queries, keys and values; windows by layer where they are switched on."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import attention, gated_mlp, llama_style, norms
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, from_layer


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    return (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape, input_bias=True)
        | gated_mlp(shape, fields.size("intermediate_size"))
    )


ARCHITECTURE = Architecture(
    name="qwen2",
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
    windows=Windows(4096, switch="use_sliding_window", sliding=from_layer(28, "max_window_layers")),
    block=_block,
    library=Library("qwen2", "Qwen2"),
    runs=Fused(llama_style),
    gguf=Gguf(),
)
