"""Which rotary embeddings are run, and the check of what config.json says of them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.windows import LAYER_TYPES

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Rotary types whose frequencies depend on the config alone, with the keys each needs."""
STATIC = frozenset(_NEEDED)


@dataclass(frozen=True, slots=True)
class Rope:
    """What a family's rotary embedding may be. `partial`: it may turn a part of each head only. `by_layer_type`:
    config.json gives one for each type of layer. `zeros` are keys whose number may be 0."""

    kinds: frozenset[str] = STATIC
    partial: bool = False
    by_layer_type: bool = False
    zeros: frozenset[str] = frozenset()

    def check(self, fields: ConfigFields) -> None:
        """Raise UnsupportedModelError for an embedding that would be computed wrongly."""
        fields.number("rope_theta")
        fields.number("rope_local_base_freq")
        self._check_partial(fields, "partial_rotary_factor", fields.number("partial_rotary_factor"))
        for key in ("rope_scaling", "rope_parameters"):
            value = fields.values.get(key)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise fields.refuse(key, f"is {value!r}; it must be an object or null")
            nested = [name for name in value if name in LAYER_TYPES]
            if nested and not self.by_layer_type:
                raise fields.refuse(key, f"differs by layer type, which {fields.family} does not support")
            for name in nested:
                if value[name] is None:
                    continue
                if not isinstance(value[name], Mapping):
                    raise fields.refuse(f"{key}.{name}", "must be an object or null")
                self._check_entry(fields, f"{key}.{name}", value[name])
            if nested or not value:
                continue
            if self.by_layer_type and key == "rope_parameters":
                raise fields.refuse(key, "must be given for each layer type")
            self._check_entry(fields, key, value)

    def _check_entry(self, fields: ConfigFields, path: str, entry: Mapping[str, Any]) -> None:
        for key in ("rope_type", "type"):
            kind = entry.get(key, "default")
            if not isinstance(kind, str) or kind not in self.kinds:
                raise fields.refuse(
                    f"{path}.{key}",
                    f"is {kind!r}, whose frequencies are unknown or depend on the requests seen; "
                    f"use a checkpoint with {', '.join(sorted(self.kinds))}",
                )
        for key, number in entry.items():
            if isinstance(number, bool | str) or number is None:
                continue
            if number == 0 and key in self.zeros:
                continue
            if not isinstance(number, int | float) or not 0 < number <= sys.float_info.max:
                raise fields.refuse(f"{path}.{key}", f"is {number!r}; it must be a positive finite number")
        for key in _NEEDED.get(entry.get("rope_type", entry.get("type", "default")), ()):
            if entry.get(key) is None:
                raise fields.refuse(f"{path}.{key}", "is missing; use the complete config.json of the checkpoint")
        self._check_partial(fields, f"{path}.partial_rotary_factor", entry.get("partial_rotary_factor") or 1.0)

    def _check_partial(self, fields: ConfigFields, path: str, factor: object) -> None:
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            raise fields.refuse(path, f"is {factor!r}; it must be a number")
        if factor > 1 or (factor != 1 and not self.partial):
            raise fields.refuse(path, f"is {factor}, which {fields.family} does not support; it must be 1")
