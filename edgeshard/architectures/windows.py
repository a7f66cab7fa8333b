"""The sliding windows of decoder blocks, as a config.json sets them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.limits import MAX_CONTEXT

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = frozenset({FULL, SLIDING})

SlidingLayers = Callable[[ConfigFields, int], list[bool]]
"""(fields, number of blocks) -> whether each block has a window, if config.json does not list their
types."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A family's rule for sliding windows.

    `default` is the window of a config.json without the key `sliding_window` (a null there is
    none), 0 for none. `switch` names the flag that has to be set for any window, if there is one.
    Without `sliding` all blocks are alike; with it they follow `layer_types`, or `sliding` if that
    is left out.
    """

    default: int = 0
    switch: str = ""
    sliding: SlidingLayers | None = None

    def check(self, fields: ConfigFields, layer_count: int) -> None:
        """Raise UnsupportedModelError naming the key for entries that are wrong or contradict each
        other."""
        in_use = fields.flag(self.switch) if self.switch else True
        if fields.given("sliding_window"):
            # Some configs are saved with a window of 0 if it is switched off.
            check = fields.size if in_use else fields.count
            check("sliding_window", most=MAX_CONTEXT)
        if not fields.given("layer_types"):
            if self.sliding is not None and in_use:
                self.sliding(fields, layer_count)  # refuses what it cannot read
            return
        types = fields.values["layer_types"]
        if (
            not isinstance(types, list | tuple)
            or len(types) != layer_count
            or any(not isinstance(kind, str) or kind not in LAYER_TYPES for kind in types)
        ):
            why = (
                f"must name full_attention or sliding_attention for each of the {layer_count} "
                "layers"
            )
            raise fields.refuse("layer_types", why)
        if self.sliding is None and len(set(types)) > 1:
            raise fields.refuse(
                "layer_types",
                f"differs by layer, which {fields.family} does not support; remove it",
            )
        if SLIDING in types and not (in_use and self._window(fields)):
            why = "is not in use, yet layer_types has sliding_attention; make them agree"
            raise fields.refuse("sliding_window", why)

    def layer_types(self, fields: ConfigFields, layer_count: int) -> tuple[str, ...]:
        """`full_attention` or `sliding_attention` for each block, of a config that `check`
        accepts."""
        types = fields.values.get("layer_types")
        if self.sliding is None:
            return (SLIDING if self._window(fields) else FULL,) * layer_count
        if types is not None:
            return tuple(types)
        if self.switch and not fields.flag(self.switch):
            return (FULL,) * layer_count
        return tuple(SLIDING if slides else FULL for slides in self.sliding(fields, layer_count))

    def sizes(self, fields: ConfigFields, layer_count: int) -> tuple[int, ...]:
        """The most positions that a token of each block sees, its own included; 0 for all positions
        before it."""
        window = self._window(fields)
        return tuple(
            window if kind == SLIDING else 0 for kind in self.layer_types(fields, layer_count)
        )

    def _window(self, fields: ConfigFields) -> int:
        if self.switch and not fields.flag(self.switch):
            return 0
        return fields.values.get("sliding_window", self.default) or 0


def all_but_every(pattern: int, key: str = "") -> SlidingLayers:
    """Every `pattern`th block sees everything, the others slide; config.json may set the number
    under `key`."""

    def sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
        every = fields.size(key, pattern) if key else pattern
        return [(layer + 1) % every != 0 for layer in range(layer_count)]

    return sliding


def from_layer(first: int, key: str) -> SlidingLayers:
    """The blocks slide from the index that config.json sets under `key`."""

    def sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
        start = fields.count(key, first)
        return [layer >= start for layer in range(layer_count)]

    return sliding
