"""The units in which a node packs a model: a layer, an expert of one, the embedding, the head with its norm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.config import read_config
from edgeshard.architectures.tensors import expected_tensors, name_in_block
from edgeshard.architectures.weights import shares_embedding
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.models.model import LayerRange, Part

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
            names = [layer_unit(tensor.unit) if expert is None else expert_unit(tensor.unit, expert)]
        elif tensor.unit is Part.TIED:
            embeds = first and not (last and shares_embedding(shape, quantisation))
            names = [EMBEDDING_UNIT] * embeds + [HEAD_UNIT] * last
        else:
            names = [EMBEDDING_UNIT if tensor.unit is Part.EMBEDDING else HEAD_UNIT]
        for unit in names:
            units.setdefault(unit, set()).add(name)
    return {unit: frozenset(names) for unit, names in units.items()}
