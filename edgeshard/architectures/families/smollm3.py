"""smollm3: the Llama kind, where some blocks, as a rule every fourth, have no positions."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import llama_block, llama_style, never_null
from edgeshard.architectures.record import Architecture, BlockStyle, Fused, Library
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows


def _rotates(fields: ConfigFields, layer_count: int) -> list[bool]:
    """Whether each block has positions: a 1 in `no_rope_layers` says so, despite its name."""
    listed = fields.values.get("no_rope_layers")
    if listed is None:
        interval = fields.size("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layer_count)]
    if (
        not isinstance(listed, list | tuple)
        or len(listed) < layer_count
        or any(type(item) is not int or item not in (0, 1) for item in listed)
    ):
        raise fields.refuse(
            "no_rope_layers", f"must have a 0 or a 1 for each of the {layer_count} layers"
        )
    return [bool(rotates) for rotates in listed[:layer_count]]


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    return [not rotates for rotates in _rotates(fields, layer_count)]


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    style = llama_style(fields, shape, layer)
    return style if _rotates(fields, shape.layer_count)[layer] else replace(style, rotary=None)


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.size("no_rope_layer_interval")
    _rotates(fields, layer_count)


ARCHITECTURE = Architecture(
    name="smollm3",
    defaults={
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
    checks=(never_null("num_key_value_heads"), _check),
    rope=Rope(theta=2_000_000.0),
    windows=Windows(switch="use_sliding_window", sliding=_sliding),
    block=llama_block(bias="attention_bias", mlp_bias="mlp_bias"),
    library=Library("smollm3", "SmolLM3"),
    runs=Fused(_style),
    gguf=Gguf(permuted=True),
)
