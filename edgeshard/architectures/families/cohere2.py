"""cohere2: attention and MLP side by side behind one LayerNorm, windows in three of four blocks;
blocks without have no positions."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, sliding
from edgeshard.architectures.parts import attention, even_split, fixed_values, gated_mlp, norms
from edgeshard.architectures.record import Architecture, Ends, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, all_but_every

_PATTERN, _EVERY = "sliding_window_pattern", 4
_WINDOWS = Windows(4096, sliding=all_but_every(_EVERY, key=_PATTERN))


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, "input_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | gated_mlp(shape, fields.size("intermediate_size"))
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    types = _WINDOWS.layer_types(fields, layer_count)
    if "sliding_attention" in types and not any(_WINDOWS.sizes(fields, layer_count)):
        raise fields.refuse(
            "sliding_window", "is null, yet some layers slide; give it, or layer_types without them"
        )
    every = fields.size(_PATTERN, _EVERY)
    if not fields.given("layer_types") and (switch := fields.size("layer_switch", every)) != every:
        raise fields.refuse(
            "layer_switch", f"is {switch}; every {every}th layer sees everything: give {_PATTERN}"
        )
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    own = even_split(fields, "hidden_size", hidden, "num_attention_heads", heads)
    if (head_dim := fields.size("head_dim", own)) != own:
        raise fields.refuse(
            "head_dim", f"is {head_dim}; it must be hidden_size / num_attention_heads, {own}"
        )


ARCHITECTURE = Architecture(
    name="cohere2",
    defaults={
        "num_attention_heads": 64,
        "num_key_value_heads": "num_attention_heads",
        "vocab_size": 256_000,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "eos_token_id": 255_001,
    },
    flags=("attention_bias",),
    numbers=("layer_norm_eps", "logit_scale"),
    checks=(
        _check,
        fixed_values(
            order_of_interleaved_layers="local_attn_first",
            position_embedding_type="rope_gptj",
            rotary_pct=1.0,
            use_gated_activation=True,
            use_parallel_block=True,
            use_qk_norm=False,
        ),
    ),
    windows=_WINDOWS,
    block=_block,
    library=Library("cohere2", "Cohere2", norm="Cohere2LayerNorm"),
    runs=Plugged(),
    ends=lambda fields, shape: Ends(
        fields.number("layer_norm_eps"), logit_divisor=1 / fields.number("logit_scale")
    ),
    gguf=Gguf(config=sliding),
)
