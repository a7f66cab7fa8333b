"""qwen3: norms of each head's query and key, and heads of 128 unless config.json says otherwise."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import attention, gated_mlp, head_norms, llama_style, norms
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, from_layer


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | head_norms(shape)
        | gated_mlp(shape, fields.size("intermediate_size"))
    )


ARCHITECTURE = Architecture(
    name="qwen3",
    defaults={"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    windows=Windows(4096, switch="use_sliding_window", sliding=from_layer(28, "max_window_layers")),
    block=_block,
    library=Library("qwen3", "Qwen3"),
    runs=Fused(llama_style),
    gguf=Gguf(),
)
