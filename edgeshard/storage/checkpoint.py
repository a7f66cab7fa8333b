"""Reading a Hugging Face checkpoint on disk: safetensors headers, the shard index, the small files
beside them.

The contents of a file are checked before they are used: sizes are capped before reading, offsets
must tile the file exactly, shapes must match byte counts, and file names in an index are names,
never paths. Weights are never unpickled. Format: https://huggingface.co/docs/safetensors, an 8-byte
little-endian length, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.architectures import check_manifest, is_run, parse_config, parts_of_joined, unit_of
from edgeshard.domain.errors import (
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedModelError,
)
from edgeshard.domain.ids import Digest, ModelName, check_name
from edgeshard.domain.models.dtypes import DType, IntegerFormat
from edgeshard.domain.models.model import (
    FileInfo,
    FurtherBlocks,
    ModelManifest,
    Part,
    RowOrder,
    TensorInfo,
)
from edgeshard.storage.forms import (
    SMALL_FILES,
    check_small_file,
    decode_text,
    malformed,
    parse_json_object,
    truncated,
)
from edgeshard.storage.locations import BlobLocation, read_chunks
from edgeshard.storage.model_directory import ModelDirectory, open_regular

Progress = Callable[[int, int], None]
"""A call with (bytes done, bytes in all)."""

HEADER_LIMIT_BYTES = 32 << 20
CONFIG_LIMIT_BYTES = 1 << 20
FILE_LIMIT_BYTES = 256 << 20
"""The most bytes of a file that travels with a model, unless its name has a limit of its own."""
_FILE_LIMITS = {
    "tokenizer.json": 64 << 20,
    "generation_config.json": CONFIG_LIMIT_BYTES,
    "tokenizer_config.json": 8 << 20,
    "chat_template.jinja": CONFIG_LIMIT_BYTES,
    "edgeshard_experts.json": 32 << 20,
}
CHUNK_BYTES = 4 << 20
_HASHING_THREADS = min(4, max(2, os.cpu_count() or 1))
_PROGRESS_EVERY_S = 0.1
_RANK_LIMIT = 8
_LARGEST = 2**63 - 1

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_LENGTH = struct.Struct("<Q")

_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
# Every type of the format, because a tensor that no stage needs (a mask, a counter) may have any of
# them.
_BITS = {
    name: bits
    for bits, names in {
        64: "F64 I64 U64 C64",
        32: "F32 I32 U32",
        16: "F16 BF16 I16 U16",
        8: "BOOL I8 U8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        6: "F6_E2M3 F6_E3M2",
        4: "F4",
    }.items()
    for name in names.split()
}
_NAME_LIMIT = 512
"""The most characters of a tensor's name; a message takes no more."""
_SHARDS_LIMIT = 4096
_NOT_RUN = (None, Part.FURTHER)
_NOT_HASHED = Digest("0" * 64)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of one tensor: `size` bytes at `offset` of `file`. `stored_dtype` is the format's
    own name.

    Where `integers` is given, the bytes are blocks of that format, of numbers that `stored_dtype`
    holds.
    """

    name: str
    stored_dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int
    integers: IntegerFormat | None = None
    order: RowOrder | None = None
    """The order of the rows in the file, if it is not the model's."""

    @property
    def dtype(self) -> DType:
        """The type of the elements. Raises UnsupportedModelError for one that EdgeShard does not
        run."""
        if self.stored_dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"tensor {self.name} in {self.file.name} has type {self.stored_dtype}; "
                f"convert the checkpoint to one of {', '.join(_DTYPES)}",
                field=self.name,
                reason="UNSUPPORTED_DTYPE",
            )
        return _DTYPES[self.stored_dtype]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A small file that travels with the model; `size` in bytes."""

    name: str
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers are checked and whose tensors are not yet read. `notes` are for an
    operator."""

    directory: Path
    config_json: str
    tensors: tuple[StoredTensor, ...]
    files: tuple[StoredFile, ...]
    notes: tuple[str, ...] = ()
    scratch: Path | None = None
    """A temporary directory with some of the files."""

    @property
    def config(self) -> dict[str, Any]:
        """The decoded config.json. Raises InvalidArgumentError."""
        return parse_json_object(self.config_json, _CONFIG)


def open_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`, single-file or sharded, with every header checked.

    The model is one that EdgeShard runs, and every file lies in the directory (`ModelDirectory`)
    and has its form.

    Raises NotFoundError for a missing file, UnsupportedModelError when the model is not run or the
    weights are pickled, InvalidArgumentError for a file that leads elsewhere or breaks its format's
    rules, DataLossError (naming file and tensor) for a truncated file.
    """
    model = ModelDirectory.at(directory)
    config_json = read_config_json(model)
    config = parse_json_object(config_json, _CONFIG)
    parse_config(config)  # refuses before any header is read
    notes: list[str] = []
    tensors = experts_apart(config, stored_tensors(model, notes, config))
    return Checkpoint(model.root, config_json, tensors, small_files(model), tuple(notes))


def read_config_json(model: ModelDirectory) -> str:
    """The text of config.json. Raises NotFoundError, and InvalidArgumentError for bytes that are no
    text."""
    if not model.has(_CONFIG) and (error := _only_gguf(model.root)) is not None:
        raise error
    return decode_text(_read(model.file(_CONFIG), _CONFIG, CONFIG_LIMIT_BYTES), _CONFIG)


def read_config(directory: Path) -> dict[str, Any]:
    """The decoded config.json of a model directory. Raises NotFoundError or
    InvalidArgumentError."""
    return parse_json_object(read_config_json(ModelDirectory.at(directory)), _CONFIG)


def stored_tensors(
    model: ModelDirectory, notes: list[str] | None = None, config: Mapping[str, Any] | None = None
) -> tuple[StoredTensor, ...]:
    """All tensors of a directory, whatever their purpose. Raises as `open_checkpoint` does.

    Differences between an index and its files go into `notes`. A file may be missing if `config` is
    given and needs no tensor that the index places in it.
    """
    if model.has(_SINGLE):
        return read_header(model.file(_SINGLE), _SINGLE)
    if model.has(_INDEX):
        return _read_shards(model, [] if notes is None else notes, config)
    raise _no_weights(model.root)


def experts_apart(
    config: Mapping[str, Any], tensors: Iterable[StoredTensor]
) -> tuple[StoredTensor, ...]:
    """The tensors of a checkpoint, with those of single experts in the place of one that holds all
    of a layer.

    Each is a range of the bytes, so that nothing is read here, and nothing larger than one expert's
    later.
    """
    split_tensors: list[StoredTensor] = []
    for tensor in tensors:
        parts = parts_of_joined(config, tensor.name, tensor.shape)
        if not parts or tensor.size % len(parts):
            split_tensors.append(tensor)
            continue
        size = tensor.size // len(parts)
        for number, (name, shape) in enumerate(parts.items()):
            split_tensors.append(
                replace(
                    tensor, name=name, shape=shape, offset=tensor.offset + number * size, size=size
                )
            )
    return tuple(split_tensors)


def small_files(model: ModelDirectory) -> tuple[StoredFile, ...]:
    """The files of a directory that travel with the model, each of its form."""
    return tuple(_small_file(model, name) for name in SMALL_FILES if model.has(name))


def _small_file(model: ModelDirectory, name: str) -> StoredFile:
    path = model.file(name)
    check_file_size(name, path.stat().st_size)
    data = _read(path, name, _FILE_LIMITS.get(name, FILE_LIMIT_BYTES))
    check_small_file(name, data)
    return StoredFile(name, path, len(data))


def check_file_size(name: str, size: int) -> None:
    """Raise InvalidArgumentError naming a file that is larger than a node reads, which parses the
    files it knows."""
    limit = _FILE_LIMITS.get(name, FILE_LIMIT_BYTES)
    if size > limit:
        raise InvalidArgumentError(
            f"{name} has {size} bytes; at most {limit} are accepted",
            field=name,
            reason="FILE_TOO_LARGE",
        )


def build_manifest(
    name: str, checkpoint: Checkpoint, progress: Progress | None = None
) -> ModelManifest:
    """The manifest of a checkpoint under `name`, with the sha256 of the raw bytes of every tensor a
    stage can need.

    Everything that can be refused without reading the weights is refused first. `progress` is
    called from the calling thread. Raises UnsupportedModelError, InvalidArgumentError or
    DataLossError naming the field or tensor at fault.
    """
    draft = draft_manifest(name, checkpoint)
    return hash_manifest(draft, item_locations(checkpoint, draft), progress)


def draft_manifest(name: str, checkpoint: Checkpoint) -> ModelManifest:
    """The manifest as it is known before the weights are read, without digests. Raises as
    `build_manifest` does."""
    model_name = ModelName(check_name(name, "name"))
    config = checkpoint.config
    architecture = parse_config(config).architecture
    units = [unit_of(architecture, tensor.name, config) for tensor in checkpoint.tensors]
    needed = [
        tensor
        for tensor, unit in zip(checkpoint.tensors, units, strict=True)
        if unit not in _NOT_RUN
    ]
    further = [
        tensor.size
        for tensor, unit in zip(checkpoint.tensors, units, strict=True)
        if unit is Part.FURTHER
    ]
    tensors = tuple(TensorInfo(t.name, t.dtype, t.shape, _NOT_HASHED, t.integers) for t in needed)
    files = tuple(FileInfo(f.name, f.size, _NOT_HASHED) for f in checkpoint.files)
    blocks = FurtherBlocks(len(further), sum(further)) if further else None
    draft = ModelManifest(model_name, architecture, checkpoint.config_json, tensors, files, blocks)
    check_manifest(draft)
    return draft


def hash_manifest(
    draft: ModelManifest, locations: Sequence[BlobLocation], progress: Progress | None = None
) -> ModelManifest:
    """The draft with the sha256 of the bytes at `locations`: those of its tensors, then those of
    its small files.

    Some items are read and hashed at once, each by a thread, so that neither the disk nor a core
    waits for the other. Raises as `read_chunks` does.
    """
    count = len(draft.tensors)
    names = [f"tensor {t.name}" for t in draft.tensors] + [f"file {f.name}" for f in draft.files]
    # Stable order of files and offsets, so that a spinning disk reads forward.
    order = sorted(
        range(len(names)),
        key=lambda index: (index >= count, locations[index].path, locations[index].offset),
    )
    hashing = _Hashing()
    digests: dict[int, Digest] = {}
    with ThreadPoolExecutor(_HASHING_THREADS, "hash") as pool:
        futures = {
            index: pool.submit(hashing.sha256, locations[index], names[index]) for index in order
        }
        try:
            for index in order:
                while not futures[index].done():
                    wait([futures[index]], _PROGRESS_EVERY_S)
                    if progress is not None:
                        progress(hashing.done_bytes, draft.stored_bytes)
                digests[index] = futures[index].result()
        finally:
            hashing.is_over = True
            pool.shutdown(cancel_futures=True)
    if progress is not None:
        progress(draft.stored_bytes, draft.stored_bytes)
    return replace(
        draft,
        tensors=tuple(
            replace(tensor, sha256=digests[index]) for index, tensor in enumerate(draft.tensors)
        ),
        files=tuple(
            replace(file, sha256=digests[count + index]) for index, file in enumerate(draft.files)
        ),
    )


class _Hashing:
    """The work of the threads of `hash_manifest`."""

    def __init__(self) -> None:
        self.done_bytes = 0
        self.is_over = False
        self._lock = threading.Lock()

    def sha256(self, location: BlobLocation, what: str) -> Digest:
        sha256 = hashlib.sha256()
        for chunk in read_chunks(location, what, CHUNK_BYTES):
            if self.is_over:
                break
            sha256.update(chunk)
            with self._lock:
                self.done_bytes += len(chunk)
        return Digest(sha256.hexdigest())


def item_locations(checkpoint: Checkpoint, manifest: ModelManifest) -> list[BlobLocation]:
    """The places on this machine of the manifest's tensors, then of its small files."""
    tensors = {
        t.name: BlobLocation(t.file, t.offset, t.size, order=t.order) for t in checkpoint.tensors
    }
    files = {file.name: BlobLocation(file.path, 0, file.size) for file in checkpoint.files}
    return [tensors[info.name] for info in manifest.tensors] + [
        files[info.name] for info in manifest.files
    ]


def blob_locations(checkpoint: Checkpoint, manifest: ModelManifest) -> dict[Digest, BlobLocation]:
    """The places on this machine of every blob of the manifest."""
    digests = [tensor.sha256 for tensor in manifest.tensors] + [
        file.sha256 for file in manifest.files
    ]
    return dict(zip(digests, item_locations(checkpoint, manifest), strict=True))


def read_header(path: Path, name: str = "") -> tuple[StoredTensor, ...]:
    """The tensors of one safetensors file, in the order of their bytes. Reads the header only.

    Messages call the file `name`, since it has another one in a cache.

    Raises DataLossError for a file shorter than its header says, InvalidArgumentError for any other
    broken rule.
    """
    name = name or path.name
    with open_regular(path, name) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise truncated(name, "the header")
        (header_bytes,) = _LENGTH.unpack(prefix)
        if header_bytes > HEADER_LIMIT_BYTES:
            what = (
                f"declares a header of {header_bytes} bytes; at most {HEADER_LIMIT_BYTES} are "
                "accepted"
            )
            raise malformed(name, what)
        if header_bytes > file_bytes - _LENGTH.size:
            raise truncated(name, "the header")
        header = file.read(header_bytes)
    data_start = _LENGTH.size + header_bytes
    return parse_header(header, path, data_start, file_bytes - data_start, name)


def parse_header(
    header: bytes, path: Path, data_start: int, data_bytes: int, name: str
) -> tuple[StoredTensor, ...]:
    """The tensors a header describes, given that `data_bytes` bytes follow it, beginning at
    `data_start` of `path`.

    Messages call the file `name`. Raises as `read_header` does.
    """
    if not header.startswith(b"{"):
        raise malformed(name, "has a header that is not a JSON object")
    entries = parse_json_object(decode_text(header, name), name)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise malformed(name, "has a __metadata__ that is not an object of strings")
    tensors = [_parse_entry(name, of, entry, path, data_start) for of, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    expected = data_start
    for tensor in tensors:
        if tensor.offset + tensor.size > data_start + data_bytes:
            raise truncated(name, f"tensor {tensor.name}", tensor.name)
        if tensor.offset != expected:
            what = (
                "overlaps the tensor before it"
                if tensor.offset < expected
                else "leaves a hole before it"
            )
            raise malformed(name, f"has a tensor {tensor.name} that {what}", tensor.name)
        expected += tensor.size
    if expected != data_start + data_bytes:
        raise malformed(
            name, f"has {data_start + data_bytes - expected} bytes that belong to no tensor"
        )
    return tuple(tensors)


def _parse_entry(
    file_name: str, name: str, entry: object, path: Path, data_start: int
) -> StoredTensor:
    if not _is_text(name):
        raise malformed(file_name, f"names a tensor {name[:80]!r}, which is not valid Unicode")
    if len(name) > _NAME_LIMIT:
        raise malformed(
            file_name,
            f"names a tensor {name[:80]!r}..., which has more than {_NAME_LIMIT} characters",
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise malformed(
            file_name,
            f"describes tensor {name} by other keys than dtype, shape and data_offsets",
            name,
        )
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        type_text = dtype[:40] if isinstance(dtype, str) else type(dtype).__name__
        raise malformed(
            file_name, f"gives tensor {name} the unknown type {type_text!r}", name, "UNKNOWN_DTYPE"
        )
    if not _is_size_list(shape) or len(shape) > _RANK_LIMIT:
        what = f"gives tensor {name} a shape that is not at most {_RANK_LIMIT} sizes of 0 or more"
        raise malformed(file_name, what, name)
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise malformed(
            file_name, f"gives tensor {name} data_offsets that are not [begin, end]", name
        )
    begin, end = offsets
    if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        what = (
            f"gives tensor {name} {end - begin} bytes, which do not fit type {dtype} and shape "
            f"{shape}"
        )
        raise malformed(file_name, what, name)
    return StoredTensor(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= _LARGEST for item in value
    )


def needed_files(places: Mapping[str, str], config: Mapping[str, Any]) -> set[str]:
    """The files in which an index, the file of each tensor by its name, places a tensor that some
    stage needs."""
    architecture = parse_config(config).architecture
    return {file for name, file in places.items() if is_run(architecture, name, config)}


def _read_shards(
    model: ModelDirectory, notes: list[str], config: Mapping[str, Any] | None
) -> tuple[StoredTensor, ...]:
    """The tensors of all files that the index names, first those at the place that it gives for
    them.

    An entry without a tensor is ignored, and a tensor without an entry is added: what the model
    needs, its manifest checks. `notes` gets a line for each of the two.
    """
    places = _read_index(model)
    listed: dict[str, StoredTensor] = {}
    others: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        if not model.has(shard):
            if config is not None and shard not in needed_files(places, config):
                continue
            raise NotFoundError(
                f"{shard}, which {_INDEX} names, is missing from {model.root}", field=shard
            )
        for tensor in read_header(model.file(shard), shard):
            if places.get(tensor.name) == shard:
                listed[tensor.name] = tensor
            elif tensor.name in others and tensor.name not in places:
                what = (
                    f"does not name the file of tensor {tensor.name}, which two files contain; "
                    "name it there"
                )
                raise malformed(_INDEX, what, "weight_map")
            else:
                others[tensor.name] = tensor
    added = [tensor for name, tensor in others.items() if name not in listed]
    absent = [name for name in places if name not in listed and name not in others]
    if absent:
        notes.append(f"{_INDEX} names {_counted(absent)} that no file has")
    if added:
        names = [tensor.name for tensor in added]
        notes.append(f"{_INDEX} does not name {_counted(names)} at its place in the files; added")
    return (*listed.values(), *added)


def _counted(names: Sequence[str]) -> str:
    first = names[0][:_NAME_LIMIT]
    return f"tensor {first}" if len(names) == 1 else f"{len(names)} tensors, such as {first},"


def _read_index(model: ModelDirectory) -> dict[str, str]:
    """The file of each tensor in the index, by the tensor's name. Raises InvalidArgumentError
    unless all are names."""
    index = parse_json_object(
        decode_text(_read(model.file(_INDEX), _INDEX, HEADER_LIMIT_BYTES), _INDEX), _INDEX
    )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise malformed(_INDEX, "has no weight_map", "weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard) or ".." in shard:
            shard_text = (
                repr(shard[:80]) if isinstance(shard, str) else f"of type {type(shard).__name__}"
            )
            raise malformed(
                _INDEX,
                f"names the file {shard_text}; it must be a plain *.safetensors name",
                "weight_map",
            )
    count = len(set(weight_map.values()))
    if count > _SHARDS_LIMIT:
        raise malformed(
            _INDEX, f"names {count} files; at most {_SHARDS_LIMIT} are accepted", "weight_map"
        )
    return weight_map


def _only_gguf(directory: Path) -> EdgeShardError | None:
    """The error of a directory that has a GGUF file in place of a checkpoint; None if it has
    none."""
    names = sorted(path.name for path in directory.iterdir() if path.suffix.lower() == ".gguf")
    models = [name for name in names if not name.lower().startswith("mmproj")] or names
    if not models:
        return None
    return UnsupportedModelError(
        f"{directory} has no checkpoint, but the GGUF file {models[0]}; name the file: "
        f"{directory / models[0]}",
        field="directory",
        reason="GGUF_DIRECTORY",
    )


def _no_weights(directory: Path) -> EdgeShardError:
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickled:
        return UnsupportedModelError(
            f"{directory} has its weights as {pickled[0]} only, a format that can run code when it "
            "is read; "
            "convert it to safetensors (transformers' save_pretrained does)",
            field="directory",
            reason="PICKLED_WEIGHTS",
        )
    if (gguf := _only_gguf(directory)) is not None:
        return gguf
    return NotFoundError(f"{directory} has neither {_SINGLE} nor {_INDEX}", field="directory")


def _read(path: Path, name: str, limit_bytes: int) -> bytes:
    with open_regular(path, name) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise malformed(name, f"has more than the {limit_bytes} bytes that are accepted")
    return data


def _is_text(name: str) -> bool:
    """Whether a message can carry the name: not where it has a lone surrogate, which JSON can
    spell."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
