"""Which sorts of layer a model has, from its config.json alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures import ModelShape, expected_tensors, parse_config
from edgeshard.dtypes import DType
from edgeshard.model import LayerRange, Part
from edgeshard.profile import LayerKind
from edgeshard_agent.model.adapters import build_modules

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
    shape = parse_config(config)
    windows = _windows(config, shape)
    tensors: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(shape.layer_count)]
    for tensor in expected_tensors(config).values():
        if not isinstance(tensor.unit, Part):
            # Without the list's name and the index: `layers.3.mlp.up_proj.weight` becomes `mlp.up_proj.weight`.
            tensors[tensor.unit].append((tensor.name.split(".", 2)[2], tensor.shape))
    members: dict[tuple[int, _Tensors], list[int]] = {}
    for index in range(shape.layer_count):
        members.setdefault((windows[index], tuple(tensors[index])), []).append(index)
    return tuple(_sort(window, parts, indices) for (window, parts), indices in members.items())


def _sort(window: int, tensors: _Tensors, indices: list[int]) -> BlockSort:
    sparse = any(".experts." in name for name, _ in tensors)
    kind = LayerKind.MOE_BLOCK if sparse else LayerKind.BLOCK
    return BlockSort(kind, indices[0], len(indices), sum(math.prod(size) for _, size in tensors), window)


def outer_parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters of the embedding and of norm + head; a tied one is in both."""
    sizes = dict.fromkeys(Part, 0)
    for tensor in expected_tensors(config, LayerRange(0, parse_config(config).layer_count)).values():
        if isinstance(tensor.unit, Part):
            sizes[tensor.unit] += math.prod(tensor.shape)
    return sizes[Part.EMBEDDING] + sizes[Part.TIED], sizes[Part.HEAD] + sizes[Part.TIED]


def _windows(config: Mapping[str, Any], shape: ModelShape) -> list[int]:
    """Each block's sliding window, 0 for none, as transformers' own configuration has it."""
    # On the meta device: nothing is allocated.
    library = build_modules(config, shape, LayerRange(0, 1), DType.FLOAT32, "cpu").context.config
    window = int(getattr(library, "sliding_window", None) or 0)
    types = getattr(library, "layer_types", None)
    if types is None:
        return [window] * shape.layer_count
    return [window if kind == "sliding_attention" else 0 for kind in types]
