"""The rotary embeddings that run, and the check of config.json's entries for them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.windows import FULL, LAYER_TYPES, SLIDING

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
}
"""The keys that a rotary type needs."""
STATIC = frozenset({"default", "linear", "yarn", "llama3", "dynamic"})
"""Types whose frequencies depend on the config only; `dynamic` ones do so up to the longest context
of the config."""
WITH_SECTIONS = STATIC | {"mrope"}
"""Types of models for pictures, in which sections of a head's dimensions turn by the three axes of
a picture."""
SECTION_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
"""The keys of these sections. The three positions of a text's token are equal, so that sections do
not matter."""
_LONG = "longrope"
WITH_FACTORS = frozenset({"default", _LONG, "su"})
"""Those of models with a factor for each frequency: short ones up to the first training's context,
long ones beyond.

A deployment's context decides for all of its requests: keys of one request cannot have both.
"""
_SAME = {"dynamic": "default", "mrope": "default", "su": _LONG}
"""Types that turn as another one does: beyond the longest context nothing runs, the positions of a
text are equal."""
_LISTS = frozenset({"short_factor", "long_factor"})
_TRAINED = "original_max_position_embeddings"
_PROPORTIONAL = "proportional"
_NO_WIDTHS: Mapping[str, int] = MappingProxyType({})
_WITH_CONTEXT = frozenset({"yarn", "llama3"})
"""Rotary types whose frequencies depend on the context of the first training."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding: the frequencies of `dims` dimensions of each head, from `theta` by the
    rules of `kind`.

    `options` are the other entries of config.json for it, such as the factor. Types that need it
    find there the context of the first training, `original_max_position_embeddings`.

    Queries are multiplied by 1 + growth ln(1 + n) after the n-th time that positions passed that
    context.
    """

    kind: str
    theta: float
    dims: int
    options: Mapping[str, Any]
    growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embeddings that a family may have.

    With `partial`, an embedding may turn only a part of each head. With `by_layer_type`,
    config.json has one for each type of layer. `zeros` are keys whose number may be 0, `unread`
    keys that do not matter. `theta` and `sliding_theta` (by layer type, for layers with a window)
    are the default bases of transformers' configuration class. `sliding_key` is the key of the
    latter's base in files without entries by layer type. `assumed` is that class's default entry,
    by layer type too. Only families on the agent's own blocks need these. `growth` is the entry's
    key for the growth of queries (`Rotation`). `switch` is a key and a value, without which there
    is no rotation.
    """

    kinds: frozenset[str] = STATIC
    partial: bool = False
    by_layer_type: bool = False
    zeros: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    theta: float = 10_000.0
    sliding_theta: float = 10_000.0
    sliding_key: str = "rope_local_base_freq"
    assumed: Mapping[str, Any] = field(default_factory=dict)
    growth: str = ""
    switch: tuple[str, str] | None = None

    def turns(self, fields: ConfigFields) -> bool:
        """Whether there is a rotary embedding at all."""
        return self.switch is None or fields.values.get(self.switch[0]) == self.switch[1]

    def rotations(
        self,
        fields: ConfigFields,
        head_dim: int,
        max_context: int,
        context: int,
        widths: Mapping[str, int] = _NO_WIDTHS,
    ) -> dict[str, Rotation]:
        """The rotary embedding of each layer type, or of all layers under "", of a config that
        `check` accepts.

        `context` is the longest request's, up to `max_context`, the model's limit. `widths` are the
        head widths of layer types that differ from `head_dim`. If two entries contradict each
        other, transformers' choice wins.
        """
        values = fields.values
        if not self.by_layer_type:
            entry = self._with_factors(self._entry(fields), max_context, context)
            return {
                "": self._rotation(fields, entry, "rope_theta", self.theta, head_dim, max_context)
            }
        scaling = values.get("rope_scaling") or {}
        parameters = values.get("rope_parameters")
        parameters = self.assumed if parameters is None else parameters
        full = (
            {"rope_type": "default"}
            if not parameters
            else parameters.get(FULL) or {"rope_type": "default"}
        )
        sliding = parameters.get(SLIDING) or {}
        of_full, of_sliding = widths.get(FULL, head_dim), widths.get(SLIDING, head_dim)
        return {
            FULL: self._rotation(
                fields, {**full, **scaling}, "rope_theta", self.theta, of_full, max_context
            ),
            SLIDING: self._rotation(
                fields, sliding, self.sliding_key, self.sliding_theta, of_sliding, max_context
            ),
        }

    def _entry(self, fields: ConfigFields) -> dict[str, Any]:
        """The entry of all layers, and in it the first training's context that config.json may have
        outside."""
        values = fields.values
        parameters = values.get("rope_parameters")
        entry = dict(
            values.get("rope_scaling") or (self.assumed if parameters is None else parameters)
        )
        trained = values.get(_TRAINED) or fields.defaults.get(_TRAINED)
        return entry if trained is None else entry | {_TRAINED: trained}

    def trained_context(self, fields: ConfigFields) -> int:
        """The longest context of a deployment that has short factors; 0 for models without two
        lists of factors."""
        entry = {} if self.by_layer_type else self._entry(fields)
        return int(entry[_TRAINED]) if _kind(entry) == _LONG else 0

    def _with_factors(
        self, entry: dict[str, Any], max_context: int, context: int
    ) -> dict[str, Any]:
        """The entry with one list of factors, `factors`, which `context` selects from its two
        lists."""
        if _kind(entry) != _LONG:
            return entry
        trained = entry[_TRAINED]
        factors = entry["short_factor" if context <= trained else "long_factor"]
        rest = {key: value for key, value in entry.items() if key not in _LISTS}
        return {"factor": max_context / trained, **rest, "factors": tuple(factors)}

    def _rotation(
        self,
        fields: ConfigFields,
        entry: Mapping[str, Any],
        theta_key: str,
        default_theta: float,
        head_dim: int,
        max_context: int,
    ) -> Rotation:
        kind = _kind(entry)
        theta = entry.get("rope_theta") or fields.number(theta_key, default_theta)
        share = entry.get("partial_rotary_factor") or fields.number("partial_rotary_factor")
        options: dict[str, Any] = {_TRAINED: max_context} if kind in _WITH_CONTEXT else {}
        dims = int(head_dim * share)
        if kind == _PROPORTIONAL:  # all of a head turns, some of it by nothing
            dims, options = head_dim, {**options, "partial_rotary_factor": share}
        growth = float(entry[self.growth]) if self.growth else 0.0
        return Rotation(kind, float(theta), dims, {**options, **entry}, growth)

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
                raise fields.refuse(key, f"is {shown(value)}; it must be an object or null")
            nested = [name for name in value if name in LAYER_TYPES]
            if nested and not self.by_layer_type:
                raise fields.refuse(
                    key, f"differs by layer type, which {fields.family} does not support"
                )
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
                    f"is {shown(kind)}, whose frequencies are unknown or depend on the requests "
                    "seen; "
                    f"use a checkpoint with {', '.join(sorted(self.kinds))}",
                )
        for key, number in entry.items():
            if isinstance(number, bool) or number is None or key in ("rope_type", "type"):
                continue
            if key in _LISTS:
                if not _is_factors(number):
                    raise fields.refuse(
                        f"{path}.{key}",
                        f"is {shown(number)}; it must be a list of positive numbers",
                    )
                continue
            if key in self.unread or (number == 0 and key in self.zeros):
                continue
            if not isinstance(number, int | float) or not 0 < number <= sys.float_info.max:
                raise fields.refuse(
                    f"{path}.{key}", f"is {shown(number)}; it must be a positive finite number"
                )
        for key in _NEEDED.get(entry.get("rope_type", entry.get("type", "default")), ()):
            if entry.get(key) is None:
                raise fields.refuse(
                    f"{path}.{key}", "is missing; use the complete config.json of the checkpoint"
                )
        self._check_partial(
            fields, f"{path}.partial_rotary_factor", entry.get("partial_rotary_factor") or 1.0
        )

    def _check_partial(self, fields: ConfigFields, path: str, factor: object) -> None:
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            raise fields.refuse(path, f"is {shown(factor)}; it must be a number")
        if factor > 1 or (factor != 1 and not self.partial):
            raise fields.refuse(
                path, f"is {shown(factor)}, which {fields.family} does not support; it must be 1"
            )


def _kind(entry: Mapping[str, Any]) -> str:
    """The type of an entry. Types with the same frequencies have one name."""
    kind: str = entry.get("rope_type", entry.get("type", "default"))
    return _SAME.get(kind, kind)


def _is_factors(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, int | float)
        and not isinstance(item, bool)
        and 0 < item <= sys.float_info.max
        for item in value
    )
