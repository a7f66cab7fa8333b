"""A GGUF file as a checkpoint: its tensors in their place in the file, but for those that must be written anew."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeshard.architectures.gguf import Gguf
from edgeshard.domain.errors import FailedPreconditionError, extra_line
from edgeshard.domain.models.dtypes import BLOCK_FORMATS, STORED_GROUP, IntegerFormat
from edgeshard.importing.blocks import AT_ONCE, BYTES, Floats, TensorWriter, Width
from edgeshard.importing.gguf_config import checkpoint_name, config_of, form_of
from edgeshard.importing.gguf_file import GgufFile, GgufTensor, read_gguf
from edgeshard.importing.gguf_tokenizer import tokenizer_files
from edgeshard.importing.imported import CONVERTING, Imported, Progress, size_notes
from edgeshard.importing.stored_as import may_be_integers, with_stored
from edgeshard.importing.stores.ollama_forms import llama_cpp_form
from edgeshard.storage.checkpoint import Checkpoint, StoredFile, StoredTensor, draft_manifest

_FLOATS = frozenset({"F32", "F16", "BF16"})
_INTEGERS = {"Q8_0": IntegerFormat.INT8, "Q4_0": IntegerFormat.INT4}
_INTEGERS |= {kind.upper(): kind for kind in BLOCK_FORMATS}
_KEPT = _FLOATS | _INTEGERS.keys()


def open_gguf(path: Path, scratch: Path, width: Width, progress: Progress, template_hint: str = "") -> Imported:
    """The model in a GGUF file, or in the parts of which it is one.

    Float16, bfloat16, float32 and the types in `_INTEGERS` are kept bit for bit; others are rounded to `width`. Tensors
    that are written anew go into files of `scratch`, which must stay while the checkpoint is read. A model without a
    chat template gets the known one of the form that `template_hint` has, or else that of its special tokens.

    Raises as `read_gguf` and `config_of` do; FailedPreconditionError where the package that reads K-quants is missing.
    """
    file, form_notes = llama_cpp_form(read_gguf(path))
    config, form = config_of(file), form_of(file)
    named = {tensor: checkpoint_name(file, tensor) for tensor in file.tensors}
    notes = list(form_notes)
    tokenizer = tokenizer_files(file, notes, template_hint)
    check_planned(file, config, width)
    opener = _Opener(file, form, config, width)
    total = opener.converted_bytes(named)

    def report(done: int) -> None:
        progress(CONVERTING, min(done, total), total)

    with TensorWriter(scratch, total, report) as writer:
        # Closed when nothing looks into them any more: later, if an error leaves a tensor half read.
        maps = {part: _mapped(part) for part in {tensor.path for tensor in file.tensors.values()}}
        found = ((file.tensors[tensor], name) for tensor, name in named.items() if name)
        tensors = tuple(opener.stored(tensor, name, maps[tensor.path], writer) for tensor, name in found)
    config = with_stored(config, tensors)
    files = []
    for name, content in tokenizer.items():
        place = scratch / name
        place.write_bytes(content)
        files.append(StoredFile(name, place, len(content)))
    checkpoint = Checkpoint(path.resolve().parent, json.dumps(config, sort_keys=True), tensors, tuple(files))
    read_bytes = sum(file.tensors[tensor].size for tensor, name in named.items() if name)
    return Imported(checkpoint, (*notes, *opener.notes(writer), *size_notes(read_bytes, tensors)))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def check_planned(file: GgufFile, config: Mapping[str, Any], width: Width) -> None:
    """Raise as `open_gguf` does for types that cannot be read, and as `check_manifest` does, before a conversion."""
    for kind in {tensor.type for tensor in file.tensors.values()} - _KEPT:
        _decoder(kind)
    tensors = tuple(stored_types(file, config, width))
    stored = json.dumps(with_stored(config, tensors))
    draft_manifest("model", Checkpoint(file.path.parent, stored, tensors, ()))


def stored_types(file: GgufFile, config: Mapping[str, Any], width: Width) -> list[StoredTensor]:
    """The tensors as they would be stored, by their types alone: nothing is read or written."""
    found = []
    for tensor in file.tensors.values():
        name = checkpoint_name(file, tensor.name)
        if name is not None:
            chosen = _kept_format(config, name, tensor)
            if tensor.type not in _KEPT and len(tensor.shape) == 2 and tensor.shape[1] % STORED_GROUP == 0:
                chosen = width.integers
            found.append(StoredTensor(name, "F32", tensor.shape, tensor.path, tensor.offset, tensor.size, chosen))
    return found


def _kept_format(config: Mapping[str, Any], name: str, tensor: GgufTensor) -> IntegerFormat | None:
    """The format of integers in which this tensor is kept; None for floats and for what nodes keep as floats."""
    kind = _INTEGERS.get(tensor.type)
    if kind is None or kind not in BLOCK_FORMATS:
        return kind
    return kind if may_be_integers(config, name, len(tensor.shape)) else None


@dataclass(slots=True)
class _Opener:
    file: GgufFile
    form: Gguf
    config: Mapping[str, Any]
    width: Width

    def stored(self, tensor: GgufTensor, name: str, data: mmap.mmap, writer: TensorWriter) -> StoredTensor:
        """The tensor's place: in the file, or in the writer's where its bytes must change."""
        order = self._order(name, tensor)
        offset = self.form.unit_norms and "norm." in name
        integers = _kept_format(self.config, name, tensor)
        if (tensor.type in _FLOATS or integers is not None) and not offset:
            dtype = tensor.type if integers is None else "F32"
            if order is None:
                return StoredTensor(name, dtype, tensor.shape, tensor.path, tensor.offset, tensor.size, integers)
            return writer.raw(name, dtype, tensor.shape, _in_order(tensor, data, order), integers)
        parts = _numbers(tensor, data, order)
        if tensor.type in _KEPT and not offset:  # an exact format, of a tensor that is no matrix of integers
            return writer.rounded(name, tensor.shape, parts, Width.FLOAT32)
        if offset:
            return writer.rounded(name, tensor.shape, (part - np.float32(1) for part in parts), Width.FLOAT32)
        return writer.rounded(name, tensor.shape, parts, self.width)

    def converted_bytes(self, named: Mapping[str, str | None]) -> int:
        """The bytes that will be written anew, about."""
        size = 0
        for tensor, name in named.items():
            stored = self.file.tensors[tensor]
            if name and (stored.type not in _KEPT or self._order(name, stored) is not None):
                size += stored.size if stored.type in _KEPT else round(math.prod(stored.shape) * BYTES[self.width])
        return size

    def _order(self, name: str, tensor: GgufTensor) -> np.ndarray[Any, Any] | None:
        """The rows of the file in the checkpoint's order, [rows]; None where they are in order."""
        if not self.form.permuted:
            return None
        keys = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = keys.get(name.split(".")[-2])
        heads = None if key is None else self.config[key]
        if heads is None or tensor.shape[0] % (2 * heads):
            return None
        return np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def notes(self, writer: TensorWriter) -> list[str]:
        rounded = Counter(t.type for t in self.file.tensors.values() if t.type not in _KEPT)
        if not rounded or not writer.loss.elements:
            return []
        return [f"{', '.join(rounded)} became {self.width}: {writer.loss}"]


def _in_order(tensor: GgufTensor, data: mmap.mmap, order: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """The tensor's rows in another order, in whatever type."""
    rows = np.frombuffer(data, np.uint8, tensor.size, tensor.offset).reshape(tensor.shape[0], -1)
    step = max(1, AT_ONCE // rows.shape[1])
    for first in range(0, len(order), step):
        yield rows[order[first : first + step]].tobytes()


def _numbers(tensor: GgufTensor, data: mmap.mmap, order: np.ndarray[Any, Any] | None) -> Iterator[Floats]:
    """The tensor as float32, some rows at a time."""
    decode = _decoder(tensor.type)
    columns = tensor.shape[-1]
    count = math.prod(tensor.shape) // columns
    rows = np.frombuffer(data, np.uint8, tensor.size, tensor.offset).reshape(count, -1)
    step = max(1, AT_ONCE // columns)
    for first in range(0, count, step):
        chosen = np.arange(first, min(first + step, count)) if order is None else order[first : first + step]
        numbers = decode(rows[chosen]).astype(np.float32, copy=False).reshape(len(chosen), columns)
        yield numbers if len(tensor.shape) > 1 else numbers.reshape(-1)


def _decoder(kind: str) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The function from rows of bytes of a type to rows of numbers. Raises FailedPreconditionError without gguf."""
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
    number = GGMLQuantizationType[kind]
    return lambda rows: dequantize(np.ascontiguousarray(rows), number)
