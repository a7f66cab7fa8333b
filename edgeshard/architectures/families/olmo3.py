"""olmo3: olmo2 with windows in three of four blocks, and a rotary embedding for each type of
layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, rope_parameters, sliding
from edgeshard.architectures.parts import BEHIND_NORMS, llama_block, llama_style, row_norms
from edgeshard.architectures.record import Architecture, BlockStyle, Fused, Library
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import LAYER_TYPES, SLIDING, Windows, all_but_every

_WINDOWS = Windows(4096, sliding=all_but_every(4))
_THETA = 500_000.0


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    kind = _WINDOWS.layer_types(fields, shape.layer_count)[layer]
    return replace(llama_style(fields, shape, layer), rotary=kind)


def _check(fields: ConfigFields, layer_count: int) -> None:
    if SLIDING in _WINDOWS.layer_types(fields, layer_count) and not any(
        _WINDOWS.sizes(fields, layer_count)
    ):
        raise fields.refuse(
            "sliding_window", "is null, yet some layers slide; give it, or layer_types without them"
        )
    scaling = fields.values.get("rope_scaling")
    if isinstance(scaling, Mapping) and not LAYER_TYPES.isdisjoint(scaling):
        # The old key holds what full attention uses; entries by layer type would be passed over.
        raise fields.refuse(
            "rope_scaling", "differs by layer type; give those entries as rope_parameters"
        )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    full = rope_parameters(fields)
    theta = fields.number("rope.freq_base_swa", full["rope_theta"])
    windowed = {"rope_type": "default", "rope_theta": theta}
    return sliding(fields) | {
        "rope_parameters": {"full_attention": full, "sliding_attention": windowed}
    }


ARCHITECTURE = Architecture(
    name="olmo3",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    flags=("attention_bias",),
    checks=(_check,),
    # Published files have one base, for both types of layers. transformers 5.23 gives it to full
    # attention only: layers with a window get its default, which is the published value.
    rope=Rope(by_layer_type=True, theta=_THETA, sliding_theta=_THETA, sliding_key="rope_theta"),
    windows=_WINDOWS,
    block=llama_block(bias="attention_bias", norm_names=BEHIND_NORMS, attention_norms=row_norms),
    library=Library("olmo3", "Olmo3"),
    runs=Fused(_style),
    gguf=Gguf(("olmo2",), config=_gguf),
)
