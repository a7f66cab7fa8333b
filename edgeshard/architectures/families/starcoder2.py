"""starcoder2: LayerNorms, an MLP without a gate, biases in all of them, one window for all
blocks."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import attention, linear, norms
from edgeshard.architectures.record import Architecture, Ends, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows
from edgeshard.domain.models.model import Part


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    inner = fields.size("intermediate_size")
    bias = fields.flag("use_bias")
    return (
        norms(hidden, "input_layernorm", "post_attention_layernorm", bias=True)
        | attention(shape, input_bias=bias, output_bias=bias)
        | linear("mlp.c_fc", inner, hidden, bias)
        | linear("mlp.c_proj", hidden, inner, bias)
    )


ARCHITECTURE = Architecture(
    name="starcoder2",
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        "eos_token_id": 50256,
    },
    flags=("use_bias",),
    numbers=("norm_epsilon",),
    windows=Windows(),
    outer_names={"norm.weight": Part.HEAD, "norm.bias": Part.HEAD},
    outer=lambda fields, shape: norms(shape.hidden_size, "norm", bias=True),
    block=_block,
    library=Library("starcoder2", "Starcoder2", norm="LayerNorm"),
    runs=Plugged(),
    ends=lambda fields, shape: Ends(fields.number("norm_epsilon")),
    gguf=Gguf(),
)
