"""The check of a model's manifest against its config.json, and the tensors of one stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgeshard.architectures.config import FORMATS, parse_config
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.tensors import (
    HEAD_WEIGHT,
    canonical_name,
    expected_tensors,
    is_run,
    parts_of_joined,
    unit_of,
)
from edgeshard.architectures.weights import matrix_size
from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, DType, Quantisation
from edgeshard.domain.models.model import LayerRange, ModelManifest, TensorInfo, units_of_stage


def stage_tensors(manifest: ModelManifest, layers: LayerRange) -> tuple[TensorInfo, ...]:
    """The tensors a stage with `layers` needs, in the manifest's order."""
    config = manifest.config
    shape = parse_config(config)
    units = units_of_stage(layers, shape.layer_count)
    return tuple(t for t in manifest.tensors if unit_of(shape.architecture, t.name, config) in units)


def check_manifest(manifest: ModelManifest) -> None:
    """Raise unless the manifest holds exactly the tensors its config requires, each with its shape.

    Raises as `check_names` does, and InvalidArgumentError for a wrong shape and for the experts of a whole layer in one
    tensor. The error's `field` is the tensor's name.
    """
    config = manifest.config
    shape = parse_config(config)
    architecture = shape.architecture
    tensors = [tensor for tensor in manifest.tensors if is_run(architecture, tensor.name, config)]
    for tensor in tensors:
        if parts_of_joined(config, tensor.name, tensor.shape):
            why = "has the experts of a whole layer, as models were added before; add the model again"
            raise _wrong(tensor.name, why, "UNEXPECTED_TENSOR")
    check_names(config, [tensor.name for tensor in tensors])
    expected = expected_tensors(config)
    for tensor in tensors:
        name = canonical_name(architecture, tensor.name)
        required = expected[name].shape
        matrix = matrix_size(shape, name, required)
        found_matrix = tensor.shape if tensor.integers is not None else matrix_size(shape, name, tensor.shape)
        if found_matrix != matrix:
            required = required if tensor.integers is None else matrix
            raise _wrong(tensor.name, f"has shape {list(tensor.shape)}, but config.json requires {list(required)}")
        if tensor.integers is not None:
            block = tensor.integers.stored_block
            if len(tensor.shape) != 2 or tensor.shape[1] % block or tensor.dtype is not DType.FLOAT32:
                only = f"only float32 matrices of whole groups of {block} inputs can be"
                raise _wrong(tensor.name, f"is stored as {tensor.integers}, which {only}")
        _check_format(shape, name, tensor)


def _check_format(shape: ModelShape, name: str, tensor: TensorInfo) -> None:
    """Raise InvalidArgumentError if a tensor is stored in another format than config.json has for it."""
    if shape.stored_as is Quantisation.STORED:
        required = shape.format_of(name)
        if tensor.integers is not required:
            raise _wrong(tensor.name, f"is stored as {tensor.integers}, but {FORMATS} of config.json has {required}")
    elif tensor.integers in BLOCK_FORMATS:
        raise _wrong(tensor.name, f"is stored as {tensor.integers}, but config.json has no {FORMATS}")


def check_names(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise unless the tensors of these names are exactly those that the model of `config` runs with.

    `names` are of tensors that some stage needs (`is_run`). DataLossError for one that is missing;
    InvalidArgumentError for two tensors in one place and for a tensor of a decoder block that the config does not call
    for (ignoring it would give other tokens). The error's `field` is the tensor's name. Raises UnsupportedModelError
    as `parse_config` does.
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
                f"tensors {stored_names[name]} and {stored} are the same part of the model; keep one",
                field=stored,
                reason="DUPLICATE_TENSOR",
            )
        stored_names[name] = stored
    missing = next((name for name in expected if name not in stored_names), None)
    if missing is not None:
        # Named like its neighbours in this checkpoint; the LM head is next to the decoder they are part of.
        beside = ((name, stored) for name, stored in stored_names.items() if name != HEAD_WEIGHT)
        prefix = next((stored.removesuffix(name) for name, stored in beside if stored.endswith(name)), "")
        if missing == HEAD_WEIGHT:
            prefix = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
        raise DataLossError(
            f"tensor {prefix}{missing} is missing from the checkpoint; fetch or convert it again",
            field=prefix + missing,
            reason="MISSING_TENSOR",
        )


def _wrong(name: str, why: str, reason: str = "WRONG_TENSOR_SHAPE") -> InvalidArgumentError:
    return InvalidArgumentError(f"tensor {name} {why}", field=name, reason=reason)
