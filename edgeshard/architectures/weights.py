"""The bytes of a model's tensors once a node has loaded them, whole or as small integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edgeshard.architectures.config import parse_config
from edgeshard.architectures.registry import architecture_named
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.tensors import HEAD_WEIGHT, canonical_name, name_in_block
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, TensorInfo


def check_quantisation(shape: ModelShape, quantisation: str) -> None:
    """Raise UnsupportedModelError for a model whose weights cannot be kept so; `quantisation` may be its blocks'
    part."""
    if not architecture_named(shape.architecture).quantises:
        why = f"{shape.architecture} runs with whole weights only; remove quantisation"
        raise UnsupportedModelError.about("quantisation", why, "UNSUPPORTED_QUANTISATION")
    if quantisation == Quantisation.STORED and shape.stored_as is not Quantisation.STORED:
        why = "this model has one format for all its matrices; leave quantisation out to keep it"
        raise UnsupportedModelError.about("quantisation", why, "UNSUPPORTED_QUANTISATION")


def integers_of(
    shape: ModelShape, name: str, dimensions: int, quantisation: Quantisation | None
) -> IntegerFormat | None:
    """The format of a tensor, by canonical name, in the use that its name states; None if it is not quantised.

    In `Quantisation.STORED` it is the one that it is stored in; of a tied head it is the embedding's. Otherwise:

    Matrices of the blocks and the LM head become integers. Embeddings are looked up row by row and
    keep the dtype. Routers of experts stay whole: they are small and decide much. An expert has a
    width of its own if the model sets one.
    """
    record = architecture_named(shape.architecture)
    if quantisation is None or not record.quantises:
        return None
    if quantisation is Quantisation.STORED:
        return shape.format_of(record.embedding if shape.tied and name == HEAD_WEIGHT else name)
    if name == HEAD_WEIGHT:
        return quantisation.head
    in_block = name.startswith(f"{record.block_list}.") and record.is_quantised(name_in_block(name), dimensions)
    return (_expert_width(shape, name) or quantisation.blocks) if in_block else None


def _expert_width(shape: ModelShape, name: str) -> IntegerFormat | None:
    """The width of its own that the expert of this tensor, by canonical name, has in small integers; None without."""
    if shape.expert_widths is None:
        return None
    record = architecture_named(shape.architecture)
    expert = record.expert_index(name_in_block(name))
    if expert is None:
        return None
    layer = int(name.removeprefix(f"{record.block_list}.").partition(".")[0])
    return shape.expert_widths.of(layer, expert) if shape.expert_widths.layers[layer] else None


def shares_embedding(shape: ModelShape, quantisation: Quantisation | None) -> bool:
    """Whether a stage with embedding and LM head holds one matrix for both.

    A tied head that is rounded is a matrix of its own next to the embedding, so that a token's embedding has the same
    bits however the model is cut.
    """
    if not shape.tied or quantisation is None:
        return shape.tied
    return quantisation is Quantisation.STORED or quantisation.head is None


def matrix_size(shape: ModelShape, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """The size [outputs, inputs] of a matrix, by canonical name, stored in this `size`; that of others is as stored."""
    record = architecture_named(shape.architecture)
    if not name.startswith(f"{record.block_list}."):
        return size
    return record.matrix(name_in_block(name), size, shape.hidden_size)


def is_transposed(shape: ModelShape, name: str, size: tuple[int, ...]) -> bool:
    """Whether a whole tensor, by canonical name, is a matrix that is stored, in this `size`, as [inputs, outputs]."""
    record = architecture_named(shape.architecture)
    if not name.startswith(f"{record.block_list}."):
        return False
    return record.is_transposed(name_in_block(name), size, shape.hidden_size)


def keeps_float32(shape: ModelShape, name: str) -> bool:
    """Whether a tensor, by canonical name, keeps full precision in any dtype."""
    record = architecture_named(shape.architecture)
    return name.startswith(f"{record.block_list}.") and record.keeps_float32(name_in_block(name))


def tensor_bytes(
    shape: ModelShape, tensor: TensorInfo, layers: LayerRange, dtype: DType, quantisation: Quantisation | None
) -> int:
    """Bytes of a tensor that a stage with these layers needs, once loaded; a tied embedding may be there twice."""
    name, elements = canonical_name(shape.architecture, tensor.name), math.prod(tensor.shape)
    # Small integers are stored by rows of outputs in any family.
    matrix = matrix_size(shape, name, tensor.shape) if tensor.integers is None else tensor.shape
    if shape.tied and name == architecture_named(shape.architecture).embedding:
        ends = (layers.first == 0, layers.end == shape.layer_count)
        if shares_embedding(shape, quantisation):
            return _bytes(shape, name, matrix, dtype, quantisation) * any(ends)
        head = _bytes(shape, HEAD_WEIGHT, matrix, dtype, quantisation)
        return elements * dtype.itemsize * ends[0] + head * ends[1]
    return _bytes(shape, name, matrix, dtype, quantisation)


def _bytes(shape: ModelShape, name: str, size: tuple[int, ...], dtype: DType, quantisation: Quantisation | None) -> int:
    integers = integers_of(shape, name, len(size), quantisation)
    if integers is not None:
        rows, columns = size
        return integers.matrix_bytes(rows, columns, shape.group_of(integers))
    return math.prod(size) * (DType.FLOAT32 if keeps_float32(shape, name) else dtype).itemsize


def held_bytes(
    config: Mapping[str, Any],
    tensors: Iterable[TensorInfo],
    layers: LayerRange,
    dtype: DType,
    quantisation: Quantisation | None = None,
) -> int:
    """Bytes of the tensors of a stage with these layers, once loaded."""
    shape = parse_config(config)
    return sum(tensor_bytes(shape, tensor, layers, dtype, quantisation) for tensor in tensors)
