"""Parts of a model: its tensors, the unit of each, and those that a stage must hold."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgeshard.domain.ids import Digest, ModelName
from edgeshard.domain.models.dtypes import DType, IntegerFormat


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Decoder blocks [first, end)."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.end

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


class Part(StrEnum):
    """Owners of tensors outside the decoder blocks."""

    EMBEDDING = "embedding"
    """Token (and position) embedding, glued to the first block."""
    HEAD = "head"
    """Final norm and LM head, glued to the last block."""
    TIED = "tied"
    """An embedding that is the LM head too: needed by the first stage and by the last."""
    FURTHER = "further"
    """The blocks that predict tokens after the next one: no stage has them."""


Unit = int | Part
"""A decoder block's index, or a part outside the blocks."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint. `name` is the checkpoint's own; `sha256` is of its raw
    little-endian bytes.

    A matrix may be stored as small `integers`, in blocks (`IntegerFormat.stored_block_bytes`);
    `dtype` is then the one that holds their products with the scales exactly, float32.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    sha256: Digest
    integers: IntegerFormat | None = None

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        if self.integers is not None:
            return (
                self.element_count // self.integers.stored_block * self.integers.stored_block_bytes
            )
        return self.element_count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order in which a file has the rows of a matrix, if a converter swapped two of their
    dimensions.

    The file has groups of `first` x `second` rows; row (i, j) of a group is its row i * second + j.
    The model's own order has it at j * first + i. A row has `row_bytes` bytes.
    """

    first: int
    second: int
    row_bytes: int

    @property
    def group_bytes(self) -> int:
        return self.first * self.second * self.row_bytes

    def fits(self, size: int) -> bool:
        """Whether a matrix of `size` bytes has whole groups."""
        return self.group_bytes > 0 and size % self.group_bytes == 0

    def row_of_file(self, row: int) -> int:
        """The index in the file of the model's row `row`."""
        group, inside = divmod(row, self.first * self.second)
        j, i = divmod(inside, self.first)
        return group * self.first * self.second + i * self.second + j


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A small file that travels with a model, such as tokenizer.json."""

    name: str
    size: int
    sha256: Digest


@dataclass(frozen=True, slots=True)
class FurtherBlocks:
    """The tensors of `Part.FURTHER` in a checkpoint: their number and bytes. They are not in the
    store."""

    tensor_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """Everything a node needs to know of a model before it fetches a byte of it."""

    name: ModelName
    architecture: str
    config_json: str
    tensors: tuple[TensorInfo, ...]
    files: tuple[FileInfo, ...]
    further: FurtherBlocks | None = None
    """None if the checkpoint has no such blocks."""

    @property
    def config(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.config_json)
        return value

    @property
    def parameter_count(self) -> int:
        return sum(tensor.element_count for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.stored_bytes for tensor in self.tensors) + sum(
            file.size for file in self.files
        )

    def digest(self) -> Digest:
        """The model's identity: sha256 of a canonical form, independent of the order of tensors and
        of the name."""
        canonical: dict[str, object] = {
            "architecture": self.architecture,
            "config": self.config_json,
            "tensors": sorted(_canonical(tensor) for tensor in self.tensors),
            "files": sorted([f.name, f.size, f.sha256] for f in self.files),
        }
        if self.further is not None:
            canonical["further"] = [self.further.tensor_count, self.further.size_bytes]
        text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
        return Digest(hashlib.sha256(text.encode()).hexdigest())


def _canonical(tensor: TensorInfo) -> list[object]:
    integers = [] if tensor.integers is None else [tensor.integers.value]
    return [tensor.name, tensor.dtype.value, list(tensor.shape), tensor.sha256, *integers]


def units_of_stage(layers: LayerRange, layer_count: int) -> frozenset[Unit]:
    """The units a stage holds: its blocks, the embedding when it is first, norm and head when it is
    last."""
    units: set[Unit] = set(range(layers.first, layers.end))
    if layers.first == 0:
        units |= {Part.EMBEDDING, Part.TIED}
    if layers.end == layer_count:
        units |= {Part.HEAD, Part.TIED}
    return frozenset(units)


def attended_pairs(tokens: float, context: float, window: int = 0) -> float:
    """Pairs of a query and a key it sees: `tokens` consecutive queries with `context` positions
    before them."""
    whole = tokens * context + tokens * (tokens + 1) / 2
    if not window or context + tokens <= window:
        return whole
    growing = max(0.0, window - context)  # queries that see less than a window
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window
