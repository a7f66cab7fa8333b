"""apertus: norms of each head's query and key, and an MLP without a gate, whose activation xIELU
has numbers of its own in each block (arXiv 2411.13010)."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import attention, fixed_values, head_norms, linear, norms
from edgeshard.architectures.record import ACTIVATIONS, Architecture, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape

_XIELU = "xielu"


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    inner = fields.size("intermediate_size")
    bias = fields.flag("attention_bias")
    block = (
        norms(hidden, "attention_layernorm", "feedforward_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | head_norms(shape)
        | linear("mlp.up_proj", inner, hidden)
        | linear("mlp.down_proj", hidden, inner)
    )
    if fields.choice("hidden_act", ARCHITECTURE.activations) != _XIELU:
        return block
    sizes: Shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return block | {f"mlp.act_fn.{name}": size for name, size in sizes.items()}


ARCHITECTURE = Architecture(
    name="apertus",
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "vocab_size": 131_072,
        "max_position_embeddings": 65_536,
        "hidden_act": _XIELU,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    activations=ACTIVATIONS | {_XIELU},
    flags=("attention_bias",),
    checks=(fixed_values(mlp_bias=False, post_norm=False, qk_norm=True),),
    block=_block,
    library=Library("apertus", "Apertus"),
    runs=Plugged(),
)
