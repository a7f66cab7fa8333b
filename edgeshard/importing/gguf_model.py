"""A GGUF file as a checkpoint: its tensors in their place in the file, but for those that must be
written anew."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeshard.architectures import read_config
from edgeshard.domain.errors import FailedPreconditionError, UnsupportedModelError, extra_line
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, STORED_GROUP, IntegerFormat
from edgeshard.domain.models.model import RowOrder
from edgeshard.importing.blocks import AT_ONCE, BYTES, Floats, TensorWriter, Width
from edgeshard.importing.gguf_config import Target, TensorTargets, config_of, targets_of
from edgeshard.importing.gguf_file import GgufFile, GgufTensor, read_gguf
from edgeshard.importing.gguf_tokenizer import tokenizer_files
from edgeshard.importing.imported import CONVERTING, Imported, Progress, mebibytes, size_notes
from edgeshard.importing.stored_as import may_be_integers, with_stored
from edgeshard.importing.stores.ollama_forms import llama_cpp_form
from edgeshard.storage.checkpoint import Checkpoint, StoredFile, StoredTensor, draft_manifest

_FLOATS = frozenset({"F32", "F16", "BF16"})
_INTEGERS = {"Q8_0": IntegerFormat.INT8, "Q4_0": IntegerFormat.INT4}
_INTEGERS |= {kind.upper(): kind for kind in BLOCK_FORMATS}
_MATRICES_ONLY = frozenset({"Q1_0", "Q2_0"})
"""Types that the package gguf does not read."""
_KEPT = _FLOATS | _INTEGERS.keys()
Change = Callable[[Floats], Floats]


def open_gguf(
    path: Path, scratch: Path, width: Width, progress: Progress, template_hint: str = ""
) -> Imported:
    """The model in a GGUF file, or in the parts of which it is one.

    Float16, bfloat16, float32 and the types in `_INTEGERS` are kept bit for bit; others are rounded
    to `width`. Tensors that are written anew go into files of `scratch`, which must stay while the
    checkpoint is read. A model without a chat template gets the known one of the form that
    `template_hint` has, or else that of its special tokens.

    Raises as `read_gguf` and `config_of` do; FailedPreconditionError where the package that reads
    K-quants is missing.
    """
    file, form_notes = llama_cpp_form(read_gguf(path))
    config = config_of(file)
    targets = targets_of(file, config)
    notes = [*form_notes, *left_out_notes(targets), *_companion_notes(path)]
    tokenizer = tokenizer_files(file, notes, template_hint)
    check_planned(file, config, targets, width)
    opener = _Opener(config, width)
    total = opener.converted_bytes(targets)

    def report(done: int) -> None:
        progress(CONVERTING, min(done, total), total)

    with TensorWriter(scratch, total, report) as writer:
        # Closed when nothing looks into them any more: later, if an error leaves a tensor half
        # read.
        maps = {part: _mapped(part) for part in {tensor.path for tensor in file.tensors.values()}}
        tensors = tuple(opener.stored(target, maps, writer) for target in targets.tensors)
    config = with_stored(config, tensors)
    files = []
    for name, content in tokenizer.items():
        place = scratch / name
        place.write_bytes(content)
        files.append(StoredFile(name, place, len(content)))
    checkpoint = Checkpoint(
        path.resolve().parent, json.dumps(config, sort_keys=True), tensors, tuple(files)
    )
    read_bytes = sum(source.size for target in targets.tensors for source in target.sources)
    return Imported(
        checkpoint, (*notes, *opener.notes(targets, writer), *size_notes(read_bytes, tensors))
    )


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def left_out_notes(targets: TensorTargets) -> list[str]:
    """A note for each kind of tensors that the file has and the model does not run with."""
    further = [tensor.size for tensor in targets.left_out if tensor.name.startswith("blk.")]
    others = [tensor.size for tensor in targets.left_out if not tensor.name.startswith("blk.")]
    notes = []
    if further:
        size = mebibytes(sum(further))
        notes.append(f"its blocks for predicting further tokens ({size}) are left out")
    if others:
        size = mebibytes(sum(others))
        notes.append(
            f"only its text is run: its weights for pictures and sound ({size}) are left out"
        )
    return notes


def _companion_notes(path: Path) -> list[str]:
    """A note if a file for pictures lies next to the model's."""
    names = (entry.name for entry in path.parent.iterdir() if entry.suffix.lower() == ".gguf")
    companions = sorted(
        name for name in names if name.lower().startswith("mmproj") and name != path.name
    )
    return (
        [f"only its text is run: {companions[0]}, for pictures, is left out"] if companions else []
    )


def check_planned(
    file: GgufFile, config: Mapping[str, Any], targets: TensorTargets, width: Width
) -> None:
    """Raise as `open_gguf` does for types that cannot be read, and as `check_manifest` does, before
    a conversion."""
    for kind in {source.type for target in targets.tensors for source in target.sources} - _KEPT:
        _decoder(kind)
    tensors = tuple(_planned(config, targets, width))
    stored = json.dumps(with_stored(config, tensors))
    draft_manifest("model", Checkpoint(file.path.parent, stored, tensors, ()))


def stored_types(file: GgufFile, config: Mapping[str, Any], width: Width) -> list[StoredTensor]:
    """The tensors as they would be stored, by their types alone: nothing is read or written."""
    return _planned(config, targets_of(file, config), width)


def _planned(config: Mapping[str, Any], targets: TensorTargets, width: Width) -> list[StoredTensor]:
    opener, tensors = _Opener(config, width), []
    for target in targets.tensors:
        first = target.sources[0]
        integer_format = opener.kept_format(target)
        if integer_format is None and not opener.is_exact(target):
            matrix = _matrix_of(target)
            if len(matrix) == 2 and matrix[1] % STORED_GROUP == 0:
                integer_format = width.integers
        shape = target.shape if integer_format is None else _matrix_of(target)
        size = sum(source.size for source in target.sources)
        tensors.append(
            StoredTensor(target.name, "F32", shape, first.path, first.offset, size, integer_format)
        )
    return tensors


def _matrix_of(target: Target) -> tuple[int, ...]:
    """The target's shape with the outputs of a matrix first."""
    return target.shape[::-1] if target.transposed else target.shape


class _Opener:
    """The writer of a checkpoint's tensors from a file's. `config` is the model's."""

    def __init__(self, config: Mapping[str, Any], width: Width) -> None:
        decoder = read_config(config)
        assert decoder.architecture.gguf is not None
        self._form = decoder.architecture.gguf
        self._shape = decoder.shape
        self._width = width

    def kept_format(self, target: Target) -> IntegerFormat | None:
        """The format of integers in which this tensor is kept; None for floats and for what nodes
        keep as floats."""
        kinds = {source.type for source in target.sources}
        kind = _INTEGERS.get(min(kinds)) if len(kinds) == 1 else None
        if kind is None or kind not in BLOCK_FORMATS:
            return kind
        return kind if may_be_integers(self._shape, target.name, len(target.shape)) else None

    def is_exact(self, target: Target) -> bool:
        """Whether all numbers of this tensor are kept: it has a format for them, or float32 holds
        them."""
        kinds = {source.type for source in target.sources}
        return kinds <= _KEPT and (len(kinds) == 1 or kinds <= _FLOATS)

    def stored(
        self, target: Target, maps: Mapping[Path, mmap.mmap], writer: TensorWriter
    ) -> StoredTensor:
        """The tensor's place: in the file, or in the writer's if its bytes must change."""
        order, change = self._order(target), self._change(target.name)
        integers = self.kept_format(target)
        kinds = {source.type for source in target.sources}
        first = target.sources[0]
        same_bytes = change is None and len(kinds) == 1
        if integers is not None and same_bytes:
            shape = _matrix_of(target)
            if len(target.sources) == 1:
                return StoredTensor(
                    target.name, "F32", shape, first.path, first.offset, first.size, integers, order
                )
            return writer.raw(target.name, "F32", shape, self._rows(target, maps), integers)
        if kinds <= _FLOATS and same_bytes:
            if len(target.sources) == 1 and not target.transposed:
                place = (first.path, first.offset, first.size)
                return StoredTensor(target.name, first.type, target.shape, *place, order=order)
            return writer.raw(target.name, first.type, target.shape, self._rows(target, maps))
        numbers = self._numbers(target, maps, order)
        if change is not None:
            numbers = (change(part) for part in numbers)
        exact = change is not None or self.is_exact(target)
        width = Width.FLOAT32 if exact else self._width
        if target.transposed and (width.integers is None or _matrix_of(target)[1] % STORED_GROUP):
            numbers = iter([np.ascontiguousarray(np.concatenate(list(numbers)).T)])
            return writer.rounded(target.name, target.shape, numbers, width)
        return writer.rounded(target.name, _matrix_of(target), numbers, width)

    def converted_bytes(self, targets: TensorTargets) -> int:
        """The bytes that will be written anew, about."""
        size = 0
        for target in targets.tensors:
            exact = self.is_exact(target)
            if not exact or len(target.sources) > 1:
                stored = sum(source.size for source in target.sources)
                size += stored if exact else round(math.prod(target.shape) * BYTES[self._width])
        return size

    def notes(self, targets: TensorTargets, writer: TensorWriter) -> list[str]:
        rounded = Counter(
            source.type
            for target in targets.tensors
            if not self.is_exact(target)
            for source in target.sources
        )
        if not rounded or not writer.loss.elements:
            return []
        return [f"{', '.join(rounded)} became {self._width}: {writer.loss}"]

    def _change(self, name: str) -> Change | None:
        """The function from the file's numbers to the checkpoint's; None if they are the same."""
        if name.endswith(".A_log"):
            return _log_of_decay
        if self._form.unit_norms and re.search(self._form.unit_norms, name):
            return _without_unit
        return None

    def _order(self, target: Target) -> RowOrder | None:
        """The order of the tensor's rows in the file; None if it is the checkpoint's."""
        if not self._form.permuted:
            return None
        own = {"q_proj": self._shape.attention_heads, "k_proj": self._shape.kv_heads}
        parts = target.name.split(".")
        heads = own.get(parts[-2]) if len(parts) > 1 else None
        rows = target.shape[0]
        if heads is None or rows % (2 * heads):
            return None
        (source,) = target.sources
        return RowOrder(rows // (2 * heads), 2, source.size // rows)

    def _rows(self, target: Target, maps: Mapping[Path, mmap.mmap]) -> Iterator[bytes]:
        """The bytes of a tensor whose sources have one type, in the checkpoint's order."""
        first = target.sources[0]
        if target.transposed and first.type in _FLOATS:
            dtype = "<f4" if first.type == "F32" else "<u2"
            parts = [
                np.frombuffer(maps[s.path], np.uint8, s.size, s.offset) for s in target.sources
            ]
            matrices = [
                part.view(dtype).reshape(source.shape)
                for part, source in zip(parts, target.sources, strict=True)
            ]
            yield self._combined(matrices).T.tobytes()
            return
        rows = [_byte_rows(source, maps[source.path]) for source in target.sources]
        if len(rows) > 1 and self._form.in_turn:
            yield self._combined(rows).tobytes()
            return
        for part in rows:
            step = max(1, AT_ONCE // part.shape[1])
            for start in range(0, len(part), step):
                yield part[start : start + step].tobytes()

    def _numbers(
        self, target: Target, maps: Mapping[Path, mmap.mmap], order: RowOrder | None
    ) -> Iterator[Floats]:
        """The tensor as float32, some rows at a time, the outputs of a matrix first."""
        if len(target.sources) > 1 and self._form.in_turn:
            parts = [
                np.concatenate(list(_numbers(source, maps[source.path], None)))
                for source in target.sources
            ]
            yield self._combined(parts)
            return
        for source in target.sources:
            yield from _numbers(source, maps[source.path], order)

    def _combined(self, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """The parts of a tensor, [rows, ...] each, as one: rows in turn or one part after the
        other."""
        if not self._form.in_turn:
            return np.concatenate(parts)
        stacked = np.stack(parts, 1)
        return stacked.reshape(-1, *parts[0].shape[1:])


def _without_unit(numbers: Floats) -> Floats:
    return numbers - np.float32(1)


def _log_of_decay(numbers: Floats) -> Floats:
    """A_log of A = -exp(A_log)."""
    return np.log(-numbers)


def _byte_rows(tensor: GgufTensor, data: mmap.mmap) -> np.ndarray[Any, Any]:
    """The bytes of a tensor, [rows, bytes of a row]; a vector has a row for each element."""
    return np.frombuffer(data, np.uint8, tensor.size, tensor.offset).reshape(tensor.shape[0], -1)


def _numbers(tensor: GgufTensor, data: mmap.mmap, order: RowOrder | None) -> Iterator[Floats]:
    """The tensor as float32, some rows at a time, in the checkpoint's order."""
    decode = _decoder(tensor.type)
    columns = tensor.shape[-1]
    count = math.prod(tensor.shape) // columns
    rows = np.frombuffer(data, np.uint8, tensor.size, tensor.offset).reshape(count, -1)
    step = max(1, AT_ONCE // columns)
    for first in range(0, count, step):
        row_numbers: Sequence[int] = range(first, min(first + step, count))
        if order is not None:
            row_numbers = [order.row_of_file(row) for row in row_numbers]
        numbers = (
            decode(rows[np.array(row_numbers)])
            .astype(np.float32, copy=False)
            .reshape(len(row_numbers), columns)
        )
        yield numbers if len(tensor.shape) > 1 else numbers.reshape(-1)


def _decoder(kind: str) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The function from rows of bytes of a type to rows of numbers. Raises FailedPreconditionError
    without gguf."""
    plain = {"F32": "<f4", "F16": "<f2"}
    if kind in plain:
        return lambda rows: rows.view(plain[kind])
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError:
        raise FailedPreconditionError(
            f"reading {kind} needs the package gguf, of the models extra: {extra_line('models')}",
            field="model",
            reason="MISSING_EXTRA",
        ) from None
    if kind in _MATRICES_ONLY:
        what = (
            f"has {kind} in a tensor that is no matrix of the model's blocks; use a file of "
            "another quantisation"
        )
        raise UnsupportedModelError(what, field=kind, reason="UNSUPPORTED_DTYPE")
    number = GGMLQuantizationType[kind]
    return lambda rows: dequantize(np.ascontiguousarray(rows), number)
