"""The header of a GGUF model: its metadata, and the place of each tensor, in one file or in several
parts.

Weights are not read here.

Counts and lengths are the file's own words, so each is held against the rest of the file, and
against a limit, before anything of that size is made. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError, UnsupportedModelError
from edgeshard.storage.forms import TOKEN_LIMIT, malformed, truncated
from edgeshard.storage.model_directory import open_regular

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ENTRIES_LIMIT = 4096
"""The most entries of the metadata; a file has some dozens."""
_VALUES_LIMIT = 4 * TOKEN_LIMIT
"""The most values in all lists of the metadata together: a tokenizer's are tokens, scores, types
and merges."""
_TENSORS_LIMIT = 1 << 17
_KEY_LIMIT = 256
_TEXT_LIMIT = 4 << 20
"""The most bytes of one text; the longest are chat templates of some kilobytes."""
_RANK_LIMIT = 4
_ALIGNMENT_LIMIT = 1 << 20
_PARTS_LIMIT = 1024
"""The most files of a model; the largest published ones have some dozens."""
_PART = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""The types of published weights by the format's number: name, elements of a block, bytes of a
block."""
_OF_IK_LLAMA = {
    **dict(enumerate(("Q6_0", "IQ1_BN", "IQ2_BN", "Q8_K64"), 133)),
    **dict(enumerate(("IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K"), 137)),
    **dict(enumerate(("IQ4_KS", "IQ2_KS", "IQ4_KSS"), 144)),
    **dict(enumerate(("IQ5_KS", "IQ2_KT", "IQ3_KT", "IQ4_KT", "IQ3_KS", "IQ2_KL", "IQ1_KT"), 152)),
}
"""Types that only ik_llama.cpp reads."""
_INTERLEAVED = 200
"""What ik_llama.cpp adds to the number of a type whose rows are interleaved."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place: `size` bytes at `offset` of `path`. `shape` is as in a checkpoint, the
    row's length last."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model's file, or the first of its parts: its metadata are the model's."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """The header of a model in a GGUF file, or in the parts of which this file is one. Links lead
    to the contents.

    Raises NotFoundError, DataLossError for a file that ends too early, InvalidArgumentError for one
    that breaks the format's rules, UnsupportedModelError for a type of tensors that is not known,
    all naming the file.
    """
    one = _read_file(path)
    return one if one.metadata.get("split.count", 1) in (0, 1) else _joined(one)


def parts_of(path: Path) -> list[Path]:
    """All files that a model with this file may be read from, whether they exist or not: parts by
    their numbers."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 < int(match[4]) <= _PARTS_LIMIT:
        return [path]
    names = [
        f"{match[1]}{number + 1:05}{match[3]}{match[4]}{match[5]}"
        for number in range(int(match[4]))
    ]
    return [path.with_name(name) for name in names]


def _joined(one: GgufFile) -> GgufFile:
    """The model of which `one` is a part. The others lie in the same folder; their names differ in
    the number."""
    count, match = one.metadata["split.count"], _PART.fullmatch(one.path.name)
    if not isinstance(count, int) or not 1 < count <= _PARTS_LIMIT:
        raise _malformed(
            one.path, f"declares {str(count)[:20]} parts; EdgeShard reads 1 to {_PARTS_LIMIT}"
        )
    if match is None or int(match[4]) != count:
        what = (
            f"is one of {count} parts; give all of them their names back, "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
        raise _malformed(one.path, what, "split.count")
    paths = parts_of(one.path)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        what = (
            f"{missing[0]} is missing from {one.path.parent}, one of the {count} parts of this "
            "model; fetch it"
        )
        raise NotFoundError(what, field=missing[0])
    parts = [one if path == one.path else _read_file(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise _malformed(
                part.path,
                f"is not part {number + 1} of {count}, although its name says so",
                "split.no",
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise _malformed(part.path, f"has the tensor {name[:80]!r} of another part", name)
            tensors[name] = tensor
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        what = f"declares {str(expected)[:20]} tensors over all parts; they have {len(tensors)}"
        raise _malformed(parts[0].path, what, "split.tensors.count")
    return GgufFile(parts[0].path, parts[0].metadata, tensors)


def _read_file(path: Path) -> GgufFile:
    """The header of one file. Raises as `read_gguf` does."""
    with open_regular(path.resolve(), path.name) as file:
        size = path.stat().st_size
        if size < 24:
            raise truncated(path.name, "the header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_gguf(path, data, size)


def parse_gguf(path: Path, data: mmap.mmap | bytes, size: int) -> GgufFile:
    """The header in `data`, the beginning of a file of `size` bytes, which messages call by `path`.

    Raises as `read_gguf` does.
    """
    reader = _Reader(path, data)
    if reader.take(4) != _MAGIC:
        raise _malformed(path, "does not begin as a GGUF file does")
    version = reader.scalar("<I")
    if version not in _VERSIONS:
        raise _malformed(
            path, f"has version {version}; EdgeShard reads {' and '.join(map(str, _VERSIONS))}"
        )
    tensor_count, entry_count = reader.scalar("<Q"), reader.scalar("<Q")
    if tensor_count > _TENSORS_LIMIT or entry_count > _ENTRIES_LIMIT:
        raise _malformed(
            path, f"declares {tensor_count} tensors and {entry_count} entries of metadata, too many"
        )
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = reader.text(_KEY_LIMIT)
        if key in metadata:
            raise _malformed(path, f"has the key {key[:80]!r} twice")
        metadata[key] = reader.value(reader.scalar("<I"))
    header_tensors = [reader.tensor() for _ in range(tensor_count)]
    place = path.resolve()
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _ALIGNMENT_LIMIT:
        raise _malformed(path, "has a general.alignment that cannot be")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = start
    for tensor in sorted(header_tensors, key=lambda tensor: tensor.offset):
        if tensor.name in tensors:
            raise _malformed(path, f"has the tensor {tensor.name[:80]!r} twice", tensor.name)
        begin = start + tensor.offset
        if begin < end or tensor.offset % alignment:
            raise _malformed(
                path, f"has a tensor {tensor.name[:80]!r} that overlaps another", tensor.name
            )
        end = begin + tensor.size
        if end > size:
            raise truncated(path.name, f"tensor {tensor.name[:80]}")
        tensors[tensor.name] = replace(tensor, offset=begin, path=place)
    return GgufFile(path, metadata, tensors)


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path = path
        self._data = data
        self.position = 0
        self._values_left = _VALUES_LIMIT

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.position:
            raise truncated(self._path.name, "the header")
        begin = self.position
        self.position += count
        return self._data[begin : self.position]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, limit: int = _TEXT_LIMIT) -> str:
        length = self.scalar("<Q")
        if length > limit:
            raise _malformed(
                self._path, f"has a text of {length} bytes; at most {limit} are accepted"
            )
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise _malformed(self._path, "has a text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _malformed(self._path, f"has metadata of the unknown type {kind}")
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > TOKEN_LIMIT:
            raise _malformed(
                self._path, f"has a list of {count} values; at most {TOKEN_LIMIT} are accepted"
            )
        self._values_left -= count
        if self._values_left < 0:
            raise _malformed(self._path, f"has lists of more than {_VALUES_LIMIT} values together")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise _malformed(self._path, f"has a list of the unknown type {kind}")
        form = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{form[1]}", self.take(count * struct.calcsize(form))))

    def tensor(self) -> GgufTensor:
        """The entry of a tensor as the file has it: its offset counts from the first tensor."""
        name = self.text(_KEY_LIMIT)
        rank = self.scalar("<I")
        if not 1 <= rank <= _RANK_LIMIT:
            raise _malformed(self._path, f"gives tensor {name[:80]!r} {rank} dimensions", name)
        shape = tuple(reversed([self.scalar("<Q") for _ in range(rank)]))
        number, offset = self.scalar("<I"), self.scalar("<Q")
        if number not in TYPES:
            raise UnsupportedModelError(
                f"{self._path.name}: tensor {name[:80]} {_unread_type(number)}; use a file of "
                "another quantisation, "
                "such as Q8_0 or Q4_K_M",
                field=name[:80],
                reason="UNSUPPORTED_DTYPE",
            )
        kind, block, block_bytes = TYPES[number]
        if not all(0 < length < 2**40 for length in shape) or shape[-1] % block:
            raise _malformed(
                self._path, f"gives tensor {name[:80]!r} a shape that {kind} cannot have", name
            )
        return GgufTensor(
            name, kind, shape, offset, math.prod(shape) // block * block_bytes, self._path
        )


def _unread_type(number: int) -> str:
    """The reason why a tensor of this type is not read, as the rest of a sentence."""
    if number in _OF_IK_LLAMA:
        return (
            f"has the type {_OF_IK_LLAMA[number]} of ik_llama.cpp, which llama.cpp does not "
            "read either"
        )
    base = number - _INTERLEAVED
    if base in _OF_IK_LLAMA or base in TYPES:
        name = _OF_IK_LLAMA[base] if base in _OF_IK_LLAMA else TYPES[base][0]
        return (
            f"has {name} with the interleaved rows of ik_llama.cpp, which llama.cpp does not "
            "read either"
        )
    return f"has a type that EdgeShard does not know ({number})"


def _malformed(path: Path, what: str, field: str = "") -> InvalidArgumentError:
    return malformed(path.name, what, field[:80])
