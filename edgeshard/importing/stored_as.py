"""How a node keeps weights that are stored as small integers, read off the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeshard.architectures import HEAD_WEIGHT, architecture_named, canonical_name, integers_of, parse_config
from edgeshard.domain.models.dtypes import WHOLE_HEAD, IntegerFormat, Quantisation
from edgeshard.storage.checkpoint import StoredTensor


def may_be_integers(config: Mapping[str, Any], tensor: str, dimensions: int) -> bool:
    """Whether a tensor of this name may be small integers: a matrix of a block, the embedding or the head."""
    shape = parse_config(config)
    name = canonical_name(shape.architecture, tensor)
    record = architecture_named(shape.architecture)
    if not record.quantises or dimensions != 2:
        return False
    return name == record.embedding or integers_of(shape, name, dimensions, Quantisation.INT8) is not None


def stored_quantisation(config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> Quantisation | None:
    """How a node keeps these weights without rounding them again; None where no matrix of a block is integers.

    Where blocks have both formats it is int8, which holds the values of int4.
    """
    shape = parse_config(config)
    head_name = architecture_named(shape.architecture).embedding if shape.tied else HEAD_WEIGHT
    head: IntegerFormat | None = None
    blocks: set[IntegerFormat] = set()
    for tensor in tensors:
        name = canonical_name(shape.architecture, tensor.name)
        if tensor.integers is None:
            continue
        if name == head_name:
            head = tensor.integers
        elif name != HEAD_WEIGHT and integers_of(shape, name, len(tensor.shape), Quantisation.INT8) is not None:
            blocks.add(tensor.integers)
    if not blocks:
        return None
    return Quantisation.of(max(blocks, key=lambda kind: kind.stored_block_bytes), head or WHOLE_HEAD)


def whole_matrices(config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> int:
    """How many matrices of blocks are no integers, though they may be."""
    shape = parse_config(config)
    names = [(canonical_name(shape.architecture, tensor.name), tensor) for tensor in tensors]
    return sum(
        tensor.integers is None
        and name != HEAD_WEIGHT
        and integers_of(shape, name, len(tensor.shape), Quantisation.INT8) is not None
        for name, tensor in names
    )
