"""exaone4: norms behind attention and MLP, norms of each head's query and key, windows by layer. Where some
blocks have windows, the blocks without have no positions."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.parts import BEHIND_NORMS, head_norms, llama_block
from edgeshard.architectures.record import Architecture, Library, Plugged
from edgeshard.architectures.windows import Windows

_WINDOW, _PATTERN = 4096, 4


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    if fields.values.get("sliding_window", _WINDOW) is None:
        return [False] * layer_count
    every = fields.values.get("sliding_window_pattern", _PATTERN)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise fields.refuse("layer_types", f"is missing, and sliding_window_pattern is {shown(every)}, no number")
    return [(layer + 1) % every != 0 for layer in range(layer_count)]


def _check(fields: ConfigFields, layer_count: int) -> None:
    if not fields.given("layer_types"):
        _sliding(fields, layer_count)


ARCHITECTURE = Architecture(
    name="exaone4",
    defaults={"num_key_value_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5, "eos_token_id": 2},
    flags=(),
    checks=(_check,),
    windows=Windows(_WINDOW, sliding=_sliding),
    block=llama_block(norm_names=BEHIND_NORMS, attention_norms=head_norms),
    library=Library("exaone4", "Exaone4"),
    runs=Plugged(),
)
