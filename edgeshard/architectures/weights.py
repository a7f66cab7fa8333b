"""The bytes of a model's tensors once a node has loaded them, whole or as small integers.

Also the check of a model's manifest against its config.json, and the tensors of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edgeshard.architectures.model_config import FORMATS, parse_config
from edgeshard.architectures.registry import architecture_named
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.tensors import (
    HEAD_WEIGHT,
    canonical_name,
    expected_tensors,
    is_run,
    name_in_block,
    parts_of_joined,
    unit_of,
)
from edgeshard.domain.errors import DataLossError, InvalidArgumentError, UnsupportedModelError
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, ModelManifest, TensorInfo, units_of_stage


def check_quantisation(shape: ModelShape, quantisation: str) -> None:
    """Raise UnsupportedModelError for a model whose weights cannot be kept so; `quantisation` may
    be its blocks' part."""
    if not architecture_named(shape.architecture).quantises:
        why = f"{shape.architecture} runs with whole weights only; remove quantisation"
        raise UnsupportedModelError.about("quantisation", why, "UNSUPPORTED_QUANTISATION")
    if quantisation == Quantisation.STORED and shape.stored_as is not Quantisation.STORED:
        why = "this model has one format for all its matrices; leave quantisation out to keep it"
        raise UnsupportedModelError.about("quantisation", why, "UNSUPPORTED_QUANTISATION")


def integers_of(
    shape: ModelShape, name: str, dimensions: int, quantisation: Quantisation | None
) -> IntegerFormat | None:
    """The format of a tensor, by canonical name, in the use that its name states; None if it is not
    quantised.

    In `Quantisation.STORED` it is the one that it is stored in; of a tied head it is the
    embedding's. Otherwise:

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
    in_block = name.startswith(f"{record.block_list}.") and record.is_quantised(
        name_in_block(name), dimensions
    )
    return (_expert_width(shape, name) or quantisation.blocks) if in_block else None


def _expert_width(shape: ModelShape, name: str) -> IntegerFormat | None:
    """The width of its own that the expert of this tensor, by canonical name, has in small
    integers; None without."""
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

    A tied head that is rounded is a matrix of its own next to the embedding, so that a token's
    embedding has the same bits however the model is cut.
    """
    if not shape.tied or quantisation is None:
        return shape.tied
    return quantisation is Quantisation.STORED or quantisation.head is None


def matrix_size(shape: ModelShape, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """The size [outputs, inputs] of a matrix, by canonical name, stored in this `size`; that of
    others is as stored."""
    record = architecture_named(shape.architecture)
    if not name.startswith(f"{record.block_list}."):
        return size
    return record.matrix(name_in_block(name), size, shape.hidden_size)


def is_transposed(shape: ModelShape, name: str, size: tuple[int, ...]) -> bool:
    """Whether a whole tensor, by canonical name, is a matrix that is stored, in this `size`, as
    [inputs, outputs]."""
    record = architecture_named(shape.architecture)
    if not name.startswith(f"{record.block_list}."):
        return False
    return record.is_transposed(name_in_block(name), size, shape.hidden_size)


def keeps_float32(shape: ModelShape, name: str) -> bool:
    """Whether a tensor, by canonical name, keeps full precision in any dtype."""
    record = architecture_named(shape.architecture)
    return name.startswith(f"{record.block_list}.") and record.keeps_float32(name_in_block(name))


def tensor_bytes(
    shape: ModelShape,
    tensor: TensorInfo,
    layers: LayerRange,
    dtype: DType,
    quantisation: Quantisation | None,
) -> int:
    """Bytes of a tensor that a stage with these layers needs, once loaded; a tied embedding may be
    there twice."""
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


def _bytes(
    shape: ModelShape,
    name: str,
    size: tuple[int, ...],
    dtype: DType,
    quantisation: Quantisation | None,
) -> int:
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


def stage_tensors(manifest: ModelManifest, layers: LayerRange) -> tuple[TensorInfo, ...]:
    """The tensors a stage with `layers` needs, in the manifest's order."""
    config = manifest.config
    shape = parse_config(config)
    units = units_of_stage(layers, shape.layer_count)
    return tuple(
        t for t in manifest.tensors if unit_of(shape.architecture, t.name, config) in units
    )


def check_manifest(manifest: ModelManifest) -> None:
    """Raise unless the manifest holds exactly the tensors its config requires, each with its shape.

    Raises as `check_names` does, and InvalidArgumentError for a wrong shape and for the experts of
    a whole layer in one tensor. The error's `field` is the tensor's name.
    """
    config = manifest.config
    shape = parse_config(config)
    architecture = shape.architecture
    tensors = [tensor for tensor in manifest.tensors if is_run(architecture, tensor.name, config)]
    for tensor in tensors:
        if parts_of_joined(config, tensor.name, tensor.shape):
            why = (
                "has the experts of a whole layer, as models were added before; add the model again"
            )
            raise _wrong(tensor.name, why, "UNEXPECTED_TENSOR")
    check_names(config, [tensor.name for tensor in tensors])
    expected = expected_tensors(config)
    for tensor in tensors:
        name = canonical_name(architecture, tensor.name)
        required = expected[name].shape
        matrix = matrix_size(shape, name, required)
        found_matrix = (
            tensor.shape if tensor.integers is not None else matrix_size(shape, name, tensor.shape)
        )
        if found_matrix != matrix:
            required = required if tensor.integers is None else matrix
            raise _wrong(
                tensor.name,
                f"has shape {list(tensor.shape)}, but config.json requires {list(required)}",
            )
        if tensor.integers is not None:
            block = tensor.integers.stored_block
            if (
                len(tensor.shape) != 2
                or tensor.shape[1] % block
                or tensor.dtype is not DType.FLOAT32
            ):
                only = f"only float32 matrices of whole groups of {block} inputs can be"
                raise _wrong(tensor.name, f"is stored as {tensor.integers}, which {only}")
        _check_format(shape, name, tensor)


def _check_format(shape: ModelShape, name: str, tensor: TensorInfo) -> None:
    """Raise InvalidArgumentError if a tensor is stored in another format than config.json has for
    it."""
    if shape.stored_as is Quantisation.STORED:
        required = shape.format_of(name)
        if tensor.integers is not required:
            raise _wrong(
                tensor.name,
                f"is stored as {tensor.integers}, but {FORMATS} of config.json has {required}",
            )
    elif tensor.integers in BLOCK_FORMATS:
        raise _wrong(
            tensor.name, f"is stored as {tensor.integers}, but config.json has no {FORMATS}"
        )


def check_names(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise unless the tensors of these names are exactly those that the model of `config` runs
    with.

    `names` are of tensors that some stage needs (`is_run`). DataLossError for one that is missing;
    InvalidArgumentError for two tensors in one place and for a tensor of a decoder block that the
    config does not call for (ignoring it would give other tokens). The error's `field` is the
    tensor's name. Raises UnsupportedModelError as `parse_config` does.
    """
    architecture = parse_config(config).architecture
    expected = expected_tensors(config)
    stored_names: dict[str, str] = {}
    for stored in names:
        name = canonical_name(architecture, stored)
        if name not in expected:
            remedy = "use the config.json that belongs to the checkpoint"
            why = f"has no place in the model that config.json describes; {remedy}"
            raise _wrong(stored, why, "UNEXPECTED_TENSOR")
        if name in stored_names:
            raise InvalidArgumentError(
                f"tensors {stored_names[name]} and {stored} are the same part of the model; keep "
                "one",
                field=stored,
                reason="DUPLICATE_TENSOR",
            )
        stored_names[name] = stored
    missing = next((name for name in expected if name not in stored_names), None)
    if missing is not None:
        # Named like its neighbours in this checkpoint; the LM head is next to the decoder they are
        # part of.
        beside = ((name, stored) for name, stored in stored_names.items() if name != HEAD_WEIGHT)
        prefix = next(
            (stored.removesuffix(name) for name, stored in beside if stored.endswith(name)), ""
        )
        if missing == HEAD_WEIGHT:
            prefix = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
        raise DataLossError(
            f"tensor {prefix}{missing} is missing from the checkpoint; fetch or convert it again",
            field=prefix + missing,
            reason="MISSING_TENSOR",
        )


def _wrong(name: str, why: str, reason: str = "WRONG_TENSOR_SHAPE") -> InvalidArgumentError:
    return InvalidArgumentError(f"tensor {name} {why}", field=name, reason=reason)
