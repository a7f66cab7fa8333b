"""How far back each decoder block looks: the sliding windows that a config.json asks for. Pure.

Defaults are those of transformers' configuration classes, as everywhere in this package.
"""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields

_DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096, "gemma3": 4096}
_BY_LAYER = frozenset({"qwen2", "qwen3", "gemma3"})
_WITHOUT = frozenset({"llama", "gpt2", "opt"})


def layer_windows(fields: ConfigFields, layer_count: int) -> tuple[int, ...]:
    """Of each block the most positions a token sees, its own included; 0 for all before it.

    `fields` are those of a config that `parse_config` accepts.
    """
    architecture, values = fields.architecture, fields.values
    window = values.get("sliding_window", _DEFAULT_WINDOW.get(architecture)) or 0
    if architecture.startswith("qwen") and not values.get("use_sliding_window"):
        window = 0
    if architecture in _WITHOUT or not window:
        return (0,) * layer_count
    if architecture not in _BY_LAYER:
        return (window,) * layer_count
    return tuple(window if slides else 0 for slides in _sliding(fields, layer_count))


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    types = fields.values.get("layer_types")
    if types is not None:
        return [kind == "sliding_attention" for kind in types]
    if fields.architecture == "gemma3":
        pattern = fields.size("sliding_window_pattern", 6)
        return [(layer + 1) % pattern != 0 for layer in range(layer_count)]
    first = fields.values.get("max_window_layers", 28)
    return [layer >= first for layer in range(layer_count)]
