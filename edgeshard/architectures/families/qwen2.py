"""qwen2: biases of queries, keys and values; windows by layer if they are switched on. Of llava and
internvl the text runs."""

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
    nested={"internvl": "qwen2", "llava": "qwen2"},
    either_ties=frozenset({"llava"}),
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
    nested_defaults={
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    },
    windows=Windows(4096, switch="use_sliding_window", sliding=from_layer(28, "max_window_layers")),
    prefixes=("model.", "language_model."),
    block=_block,
    library=Library("qwen2", "Qwen2"),
    runs=Fused(llama_style),
    gguf=Gguf(),
)
