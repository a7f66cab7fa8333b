"""Filling a stage's modules from a checkpoint, one tensor at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Protocol

import torch

from edgeshard.architectures import (
    ExpectedTensor,
    canonical_name,
    is_transposed,
    keeps_float32,
    matrix_size,
)
from edgeshard.domain.errors import (
    DataLossError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.models.dtypes import DType
from edgeshard_agent.model.modules import StageModules
from edgeshard_agent.ops.block_formats import BlockWeight, Weight
from edgeshard_agent.ops.quantize import QuantizedWeight


class TensorSource(Protocol):
    """The source of a checkpoint's tensors."""

    def names(self) -> Collection[str]:
        """The checkpoint's own names of all its tensors."""

    def read(self, name: str) -> Weight:
        """One tensor on the CPU as it is stored, possibly mapped from a file. Raises
        DataLossError."""


def check_filled(modules: StageModules) -> None:
    """Raise InternalError for a parameter that no tensor came for."""
    left = modules.missing()
    if left is not None:
        raise InternalError(f"no tensor was loaded into {left}")


class ParameterLoader:
    """Gives parameters their tensors, in the stage's dtype on its device; `arrived` gets the bytes
    of each."""

    def __init__(
        self,
        modules: StageModules,
        source: TensorSource,
        arrived: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._modules = modules
        self._source = source
        self._arrived = arrived
        context = modules.context
        self._stored = {
            canonical_name(context.shape.architecture, name): name for name in source.names()
        }

    def total_bytes(self, expected: Mapping[str, ExpectedTensor]) -> int:
        """Bytes of these tensors, as `arrived` gets them."""
        return sum(self._held_bytes(name, tensor) for name, tensor in expected.items())

    def load(self, expected: Mapping[str, ExpectedTensor]) -> None:
        """Load these tensors, by canonical name; no others are read. At most one is in memory
        besides the stage.

        Raises DataLossError for a tensor that is missing, InvalidArgumentError for one of the wrong
        shape, both with its name as field, and ResourceExhaustedError.
        """
        for name, tensor in expected.items():
            self._load_one(name, tensor)

    def _load_one(self, name: str, tensor: ExpectedTensor) -> None:
        modules = self._modules
        source = self._source
        stored = self._stored
        if name not in stored:
            raise DataLossError(
                f"tensor {name} is missing from the checkpoint; fetch or convert it again",
                field=name,
                reason="MISSING_TENSOR",
            )
        value = source.read(stored[name])
        shape = modules.context.shape
        # stored by rows of outputs in any family
        if isinstance(value, QuantizedWeight | BlockWeight):
            size = matrix = tuple(value.shape)
        else:
            size = matrix = tuple(value.shape)
            if is_transposed(shape, name, size):
                value = value.t()
                matrix = size[::-1]
        if matrix != matrix_size(shape, name, tensor.shape):
            raise InvalidArgumentError(
                f"tensor {stored[name]} has shape {list(size)}, but config.json requires "
                f"{list(tensor.shape)}",
                field=stored[name],
                reason="WRONG_TENSOR_SHAPE",
            )
        try:
            modules.accept(name, value)
        except (RuntimeError, OSError, MemoryError) as error:
            if not _is_want_of_memory(error):
                raise
            raise ResourceExhaustedError(
                f"no memory for tensor {stored[name]}: {error}", field=stored[name]
            ) from error
        self._arrived(self._held_bytes(name, tensor))

    def _held_bytes(self, name: str, tensor: ExpectedTensor) -> int:
        context = self._modules.context
        dtype = DType.FLOAT32 if keeps_float32(context.shape, name) else context.dtype
        return prod(tensor.shape) * dtype.itemsize


def _is_want_of_memory(error: Exception) -> bool:
    """Mappings, Python and accelerators have an error for it; torch's own allocator for the CPU has
    words."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
        error
    )
