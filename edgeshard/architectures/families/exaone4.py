"""exaone4: norms behind attention and MLP, norms of each head's query and key, windows by layer.
Where some blocks have windows, the blocks without have no positions."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.gguf import Gguf, sliding
from edgeshard.architectures.parts import BEHIND_NORMS, head_norms, llama_block, llama_style
from edgeshard.architectures.record import Architecture, BlockStyle, Fused, Library
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows

_WINDOW, _PATTERN = 4096, 4


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    if fields.values.get("sliding_window", _WINDOW) is None:
        return [False] * layer_count
    every = fields.values.get("sliding_window_pattern", _PATTERN)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise fields.refuse(
            "layer_types", f"is missing, and sliding_window_pattern is {shown(every)}, no number"
        )
    return [(layer + 1) % every != 0 for layer in range(layer_count)]


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    is_sliding = bool(_WINDOWS.sizes(fields, shape.layer_count)[layer])
    has_positions = is_sliding or fields.values.get("sliding_window", _WINDOW) is None
    return replace(llama_style(fields, shape, layer), rotary="" if has_positions else None)


def _check(fields: ConfigFields, layer_count: int) -> None:
    if not fields.given("layer_types"):
        _sliding(fields, layer_count)


_WINDOWS = Windows(_WINDOW, sliding=_sliding)

ARCHITECTURE = Architecture(
    name="exaone4",
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    flags=(),
    checks=(_check,),
    windows=_WINDOWS,
    block=llama_block(norm_names=BEHIND_NORMS, attention_norms=head_norms),
    library=Library("exaone4", "Exaone4"),
    runs=Fused(_style),
    gguf=Gguf(config=sliding),
)
