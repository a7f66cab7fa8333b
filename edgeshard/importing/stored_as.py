"""The forms in which a node keeps weights that are stored as small integers, read off the
tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeshard.architectures import (
    FORMATS,
    HEAD_WEIGHT,
    STORED_AS,
    ModelShape,
    architecture_named,
    canonical_name,
    integers_of,
    name_of_experts,
    parse_config,
)
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, WHOLE_HEAD, Quantisation
from edgeshard.storage.checkpoint import StoredTensor


def may_be_integers(shape: ModelShape, tensor: str, dimensions: int) -> bool:
    """Whether a tensor of this name may be small integers: a matrix of a block, the embedding or
    the head."""
    name = canonical_name(shape.architecture, tensor)
    record = architecture_named(shape.architecture)
    if not record.quantises or dimensions != 2:
        return False
    return (
        name == record.embedding
        or integers_of(shape, name, dimensions, Quantisation.INT8) is not None
    )


def stored_quantisation(
    config: Mapping[str, Any], tensors: Sequence[StoredTensor]
) -> Quantisation | None:
    """The form in which these weights are not rounded again; None where no matrix of a block is
    integers.

    Blocks with both formats are kept as int8, which holds the values of int4.
    """
    shape = parse_config(config)
    head_name = architecture_named(shape.architecture).embedding if shape.tied else HEAD_WEIGHT
    heads = [
        t.integers
        for t in tensors
        if t.integers and canonical_name(shape.architecture, t.name) == head_name
    ]
    blocks = {tensor.integers for tensor in _matrices(shape, tensors) if tensor.integers}
    if not blocks:
        return None
    return Quantisation.of(
        max(blocks, key=lambda kind: kind.stored_block_bytes), heads[-1] if heads else WHOLE_HEAD
    )


def with_stored(config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> dict[str, Any]:
    """The config.json with the key of how these weights are stored, if any matrix of a block is
    integers.

    Tensors in llama.cpp's block formats keep them, and so does each other tensor then.
    """
    if any(tensor.integers in BLOCK_FORMATS for tensor in tensors):
        return {**config, FORMATS: _formats(parse_config(config).architecture, tensors)}
    stored_as = stored_quantisation(config, tensors)
    return dict(config) if stored_as is None else {**config, STORED_AS: stored_as.value}


def _formats(architecture: str, tensors: Sequence[StoredTensor]) -> dict[str, list[str]]:
    """The names of tensors by their format, as `FORMATS` has them."""
    names: dict[str, set[str]] = {}
    for tensor in tensors:
        if tensor.integers is not None:
            name = name_of_experts(canonical_name(architecture, tensor.name))
            names.setdefault(tensor.integers, set()).add(name)
    return {kind: sorted(names[kind]) for kind in sorted(names)}


def whole_matrices(config: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> int:
    """The number of matrices of blocks that are no integers, though they may be."""
    return sum(tensor.integers is None for tensor in _matrices(parse_config(config), tensors))


def _matrices(shape: ModelShape, tensors: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    """The tensors that are matrices of blocks and may be small integers."""
    for tensor in tensors:
        name = canonical_name(shape.architecture, tensor.name)
        if (
            name != HEAD_WEIGHT
            and integers_of(shape, name, len(tensor.shape), Quantisation.INT8) is not None
        ):
            yield tensor
