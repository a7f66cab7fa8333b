"""The units in which a node packs a model: a layer, an expert of one, the embedding, the head with
its norm.

Also the form in which a unit is packed, and the name and id of its file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.model_config import read_config
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.tensors import expected_tensors, name_in_block
from edgeshard.architectures.weights import shares_embedding
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, Part
from edgeshard.domain.models.packed_units import NOTHING_HELD, PackedParts

EMBEDDING_UNIT = "embedding"
HEAD_UNIT = "head"


def layer_unit(layer: int) -> str:
    """The unit of a layer's block, without its experts."""
    return f"layer-{layer}"


def expert_unit(layer: int, expert: int) -> str:
    return f"layer-{layer}-expert-{expert}"


def place_of_expert(unit: str) -> tuple[int, int] | None:
    """The layer and the index of a unit that is an expert."""
    match = re.fullmatch(r"layer-(\d+)-expert-(\d+)", unit)
    return None if match is None else (int(match[1]), int(match[2]))


def tensors_of_units(
    config: Mapping[str, Any], layers: LayerRange, quantisation: Quantisation | None
) -> dict[str, frozenset[str]]:
    """The canonical names of the tensors in each unit of a stage; a tied embedding is in two units
    if it is kept twice.

    Raises as `expected_tensors` does.
    """
    decoder = read_config(config)
    shape, record = decoder.shape, decoder.architecture
    first, last = layers.first == 0, layers.end == shape.layer_count
    units: dict[str, set[str]] = {}
    for name, tensor in expected_tensors(config, layers).items():
        if isinstance(tensor.unit, int):
            expert = record.expert_index(name_in_block(name))
            names = [
                layer_unit(tensor.unit) if expert is None else expert_unit(tensor.unit, expert)
            ]
        elif tensor.unit is Part.TIED:
            embeds = first and not (last and shares_embedding(shape, quantisation))
            names = [EMBEDDING_UNIT] * embeds + [HEAD_UNIT] * last
        else:
            names = [EMBEDDING_UNIT if tensor.unit is Part.EMBEDDING else HEAD_UNIT]
        for unit in names:
            units.setdefault(unit, set()).add(name)
    return {unit: frozenset(names) for unit, names in units.items()}


LAYOUT = 3
"""Version of packed files and of the kernels' layout in them; a file of another one is made
again."""


@dataclass(frozen=True, slots=True)
class UnitForm:
    """The form of a stage's packed units; a file serves only units of the same form. `model` is a
    manifest's digest."""

    model: Digest
    dtype: DType
    quantisation: Quantisation | None
    shape: ModelShape

    def key(self, unit: str) -> str:
        """A text that two units share if one file serves as both."""
        fields = {"model": self.model, "unit": unit, "dtype": str(self.dtype), "layout": LAYOUT}
        return json.dumps(fields | {"integers": self._integers(unit)}, sort_keys=True)

    def name(self, unit: str) -> str:
        """The name of the unit's file: readable in its beginning, unique in its end."""
        form = self._integers(unit).partition("/")[0] or self.dtype
        return f"{self.model[:12]}-{unit}-{form}-{self.id(unit)}"

    def id(self, unit: str) -> str:
        """The id of the unit's file: 16 hexadecimal digits of the key's sha256."""
        return hashlib.sha256(self.key(unit).encode()).hexdigest()[:16]

    def _width(self, unit: str) -> IntegerFormat | None:
        """The width of an expert that has one of its own; None if the unit is another."""
        place = place_of_expert(unit)
        return (
            None
            if place is None or self.shape.expert_widths is None
            else self.shape.expert_widths.of(*place)
        )

    def _integers(self, unit: str) -> str:
        if self.quantisation is Quantisation.STORED:
            return str(self.quantisation)
        if self.quantisation is None or unit == EMBEDDING_UNIT:
            return ""
        width = (
            self.quantisation.head
            if unit == HEAD_UNIT
            else self._width(unit) or self.quantisation.blocks
        )
        return "" if width is None else f"{width}/{self.shape.group_of(width)}"


def held_of(form: UnitForm, config: Mapping[str, Any], ids: Collection[int]) -> PackedParts:
    """The parts of a model that are packed on a node in the files of these ids; a layer counts with
    all its experts.

    `config` is the decoded config.json of the model of `form`. Raises as `tensors_of_units` does.
    """
    if not ids:
        return NOTHING_HELD
    layer_count = form.shape.layer_count
    units = tensors_of_units(config, LayerRange(0, layer_count), form.quantisation)
    absent = [
        unit for unit in units if unit.startswith("layer-") and int(form.id(unit), 16) not in ids
    ]
    lacking = {int(unit.split("-")[1]) for unit in absent}
    embedding, head = (int(form.id(unit), 16) in ids for unit in (EMBEDDING_UNIT, HEAD_UNIT))
    return PackedParts(frozenset(range(layer_count)) - lacking, embedding, head)
