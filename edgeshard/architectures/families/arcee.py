"""arcee: the Llama kind with an MLP without a gate, whose activation is the square of a relu."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import LLAMA_NORMS, attention, even_split, linear, norms
from edgeshard.architectures.record import ACTIVATIONS, Architecture, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, inner = shape.hidden_size, fields.size("intermediate_size")
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    return (
        norms(hidden, *LLAMA_NORMS)
        | attention(shape, input_bias=bias, output_bias=bias)
        | linear("mlp.up_proj", inner, hidden, mlp_bias)
        | linear("mlp.down_proj", hidden, inner, mlp_bias)
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    # transformers asks for it even where head_dim is given.
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    even_split(fields, "hidden_size", hidden, "num_attention_heads", heads)


ARCHITECTURE = Architecture(
    name="arcee",
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 128_001,
    },
    activations=ACTIVATIONS | {"relu2"},
    checks=(_check,),
    block=_block,
    library=Library("arcee", "Arcee"),
    runs=Plugged(),
    gguf=Gguf(permuted=True),
)
