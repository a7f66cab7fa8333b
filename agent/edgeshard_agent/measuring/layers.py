"""The sorts of layer that a model has, from its config.json alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures import Architecture, expected_tensors, name_in_block, parse_config, read_config
from edgeshard.domain.models.model import LayerRange, Part
from edgeshard.domain.nodes.profile import LayerKind

_Tensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class BlockSort:
    """Blocks that do the same work: `first` is one of them, `layers` how many there are, `parameters` of one."""

    kind: LayerKind
    first: int
    layers: int
    parameters: int
    window: int


def block_sorts(config: Mapping[str, Any]) -> tuple[BlockSort, ...]:
    """The distinct blocks of a model: dense or of experts, and by their window. Raises UnsupportedModelError."""
    decoder = read_config(config)
    shape, windows = decoder.shape, decoder.windows()
    tensors: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(shape.layer_count)]
    for tensor in expected_tensors(config).values():
        if not isinstance(tensor.unit, Part):
            tensors[tensor.unit].append((name_in_block(tensor.name), tensor.shape))
    members: dict[tuple[int, _Tensors], list[int]] = {}
    for index in range(shape.layer_count):
        members.setdefault((windows[index], tuple(tensors[index])), []).append(index)
    return tuple(_sort(decoder.architecture, window, parts, indices) for (window, parts), indices in members.items())


def _sort(architecture: Architecture, window: int, tensors: _Tensors, indices: list[int]) -> BlockSort:
    sparse = any(architecture.is_expert(name) for name, _ in tensors)
    kind = LayerKind.MOE_BLOCK if sparse else LayerKind.BLOCK
    return BlockSort(kind, indices[0], len(indices), sum(math.prod(size) for _, size in tensors), window)


def outer_parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of the embedding and of norm + head; a tied one is in both."""
    sizes = dict.fromkeys(Part, 0)
    for tensor in expected_tensors(config, LayerRange(0, parse_config(config).layer_count)).values():
        if isinstance(tensor.unit, Part):
            sizes[tensor.unit] += math.prod(tensor.shape)
    return sizes[Part.EMBEDDING] + sizes[Part.TIED], sizes[Part.HEAD] + sizes[Part.TIED]
