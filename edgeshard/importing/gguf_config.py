"""The config.json of a model from the metadata of its GGUF file; and the names of its tensors in a
checkpoint."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeshard.architectures import read_config
from edgeshard.architectures.gguf import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Gguf,
    GgufFields,
    rope_parameters,
)
from edgeshard.architectures.gguf_names import BLOCK, EXPERTS, GATES_AND_UPS, Half, known_keys
from edgeshard.architectures.limits import MAX_EXPERTS
from edgeshard.architectures.record import Architecture
from edgeshard.architectures.registry import RECORDS
from edgeshard.architectures.tensors import HEAD_WEIGHT, ExpectedTensor, expected_tensors
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError
from edgeshard.importing.gguf_file import GgufFile, GgufTensor
from edgeshard.storage.forms import malformed

_EMBEDDING = "token_embd.weight"

_NOT_WEIGHTS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
_BLOCK = re.compile(r"blk\.(\d{1,4})\.([\w.]+)")
_OF_OTHER_INPUTS = ("v.", "a.", "mm.")
"""How names begin of tensors for pictures and sound in the file of a language model."""


def record_of(file: GgufFile) -> Architecture:
    """The family of the file. Raises UnsupportedModelError, by name, for one that cannot be
    read."""
    name, fields = file.metadata.get("general.architecture"), _fields(file)
    for record in RECORDS.values():
        form = record.gguf
        if form is not None and name in (form.names or (record.name,)) and form.applies(fields):
            return record
    read = sorted(
        {
            name
            for record in RECORDS.values()
            if record.gguf
            for name in record.gguf.names or (record.name,)
        }
    )
    raise UnsupportedModelError(
        f"{file.path.name}: architecture {str(name)[:40]!r} cannot be read from a GGUF file; "
        "EdgeShard reads "
        f"{', '.join(read)} (other families: add the checkpoint as safetensors)",
        field="general.architecture",
        reason="UNSUPPORTED_GGUF",
    )


def check_model(file: GgufFile) -> None:
    """Raise UnsupportedModelError for an adapter, and for the part of a model that reads
    pictures."""
    metadata, name = file.metadata, file.path.name
    kind = metadata.get("general.type", "model")
    if kind == "mmproj" or (
        any(tensor.startswith("v.") for tensor in file.tensors) and _EMBEDDING not in file.tensors
    ):
        raise UnsupportedModelError(
            f"{name} has only the part of a model that reads pictures; name the file of the "
            "language model",
            field="general.type",
        )
    if kind != "model":
        raise UnsupportedModelError(
            f"{name} is not a model, but a file of type {kind}", field="general.type"
        )


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config.json of the model.

    Raises as `check_model` and `record_of` do, and for metadata that is missing or contradictory.
    """
    check_model(file)
    record, fields = record_of(file), _fields(file)
    form = _form(record)
    keys = record.keys
    config: dict[str, Any] = {
        "model_type": record.own_types[0],
        keys.hidden: fields.size("embedding_length"),
        keys.layers: fields.layers,
        "vocab_size": _vocabulary(file),
        keys.context: fields.size("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config |= _attention(record, fields)
    read = {*record.defaults, *record.sizes, *record.numbers, *record.flags}
    for key in record.numbers:
        if key.endswith(("_eps", "_epsilon")):
            plain = fields.get("attention.layer_norm_epsilon") is not None
            config[key] = fields.number(f"attention.layer_norm{'' if plain else '_rms'}_epsilon")
    config |= known_keys(fields, read)
    if record.experts is not None and fields.get("expert_count") not in (None, 0):
        config[record.experts.count[0]] = fields.size("expert_count")
        config[record.experts.top_k] = fields.size("expert_used_count")
    if record.rope is not None and not record.rope.by_layer_type:
        config["rope_parameters"] = rope_parameters(fields)
        turned = fields.get("rope.dimension_count")
        if record.rope.partial and turned is not None and keys.head_dim in config:
            share = fields.size("rope.dimension_count") / config[keys.head_dim]
            config["rope_parameters"]["partial_rotary_factor"] = share
    if type(eos := file.metadata.get("tokenizer.ggml.eos_token_id")) is int:
        config["eos_token_id"] = eos
    return config | form.config(fields)


def _attention(record: Architecture, fields: GgufFields) -> dict[str, Any]:
    """The sizes of heads; empty for a model without attention."""
    heads = fields.get("attention.head_count")
    if heads in (None, 0):
        return {}
    count = fields.size("attention.head_count")
    dims = fields.size("attention.key_length", max(1, fields.size("embedding_length") // count))
    if fields.size("attention.value_length", dims) != dims:
        raise UnsupportedModelError(
            f"{fields.file}: keys and values differ in width", field="attention.value_length"
        )
    keys = record.keys
    return {
        keys.heads: count,
        keys.kv_heads: _most_kv_heads(fields, count),
        keys.head_dim: dims,
    }


def _most_kv_heads(fields: GgufFields, heads: int) -> int:
    """The heads of keys and values of the layer with most of them; layers that differ are left to
    the family."""
    by_layer = fields.get("attention.head_count_kv")
    if not isinstance(by_layer, list):
        return fields.size("attention.head_count_kv", heads)
    counts = [count for count in by_layer if type(count) is int and count > 0]
    return max(counts, default=heads)


def _form(record: Architecture) -> Gguf:
    assert record.gguf is not None
    return record.gguf


def _fields(file: GgufFile) -> GgufFields:
    lists = [_floats(file, name) for name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)]
    return GgufFields(file.path.name, file.metadata, frozenset(file.tensors), *lists)


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Target:
    """A tensor of the checkpoint, and the tensors of the file that it is made of, in the order of
    its rows.

    `shape` is the one that the family expects; `sources` may be ranges of a file's tensor of all
    experts. If `transposed`, the family has the matrix of floats as [inputs, outputs]; the file
    always has outputs first.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    sources: list[GgufTensor] = field(default_factory=list)


@dataclass(slots=True)
class TensorTargets:
    """The tensors of the checkpoint, and the file's tensors that it does not have."""

    tensors: list[Target]
    left_out: list[GgufTensor]


def targets_of(file: GgufFile, config: Mapping[str, Any]) -> TensorTargets:
    """The tensors of the checkpoint with `config`, which is of `config_of`.

    Raises UnsupportedModelError for a tensor that the family has no place for.
    """
    decoder = read_config(config)
    record, expected = decoder.architecture, expected_tensors(config)
    prefix = record.prefixes[0] if record.prefixes else ""
    targets: dict[str, Target] = {}
    parts: dict[str, dict[int, GgufTensor]] = {}
    left_out = []
    for tensor in file.tensors.values():
        if tensor.name in _NOT_WEIGHTS:
            continue
        if _is_left_out(tensor.name, decoder.shape.layer_count):
            left_out.append(tensor)
            continue
        for name, part, source in _places(file, record, expected, tensor):
            if name not in targets:
                shape = expected[name].shape
                inner = name.split(".", 2)[2] if name.count(".") > 2 else ""
                transposed = record.is_transposed(inner, shape, decoder.shape.hidden_size)
                own = name if name == HEAD_WEIGHT else f"{prefix}{name}"
                targets[name] = Target(own, shape, transposed)
                parts[name] = {}
            if part in parts[name]:
                raise malformed(file.path.name, f"has two tensors for {name}", tensor.name)
            parts[name][part] = source
    for name, target in targets.items():
        target.sources = [parts[name][index] for index in sorted(parts[name])]
        _check_shape(file, target)
    return TensorTargets(list(targets.values()), left_out)


def _check_shape(file: GgufFile, target: Target) -> None:
    """Raise InvalidArgumentError unless the sources have the numbers of the target and, for a
    matrix, its width."""
    shapes = [source.shape for source in target.sources]
    matrix = target.shape[::-1] if target.transposed else target.shape
    fits = sum(math.prod(shape) for shape in shapes) == math.prod(matrix)
    if len(matrix) == 2 and matrix[0] > 1:
        fits = fits and all(shape[-1] == matrix[1] for shape in shapes)
    if not fits:
        first = target.sources[0].name
        what = (
            f"has {first[:80]} as {[list(shape) for shape in shapes]}, but its metadata need "
            f"{list(matrix)}"
        )
        raise malformed(file.path.name, what, first[:80])


def _is_left_out(name: str, layers: int) -> bool:
    block = _BLOCK.fullmatch(name)
    if block is not None:
        return int(block[1]) >= layers or block[2].startswith("nextn.")
    return name.startswith(_OF_OTHER_INPUTS)


def _places(
    file: GgufFile, record: Architecture, expected: Mapping[str, ExpectedTensor], tensor: GgufTensor
) -> Iterator[tuple[str, int, GgufTensor]]:
    """(canonical name, part of it, bytes) of each tensor of the checkpoint that this one is, or is
    a part of."""
    block = _BLOCK.fullmatch(tensor.name)
    if block is None:
        yield _outer_place(file, record, expected, tensor)
        return
    path, inner = f"{record.block_list}.{int(block[1])}.", block[2]
    if inner in (GATES_AND_UPS, *EXPERTS) and tensor.shape[0] > MAX_EXPERTS:
        raise _no_place(file, tensor)
    if inner == GATES_AND_UPS:
        for half, rows in zip(
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _halves(file, tensor), strict=True
        ):
            yield from _expert_places(file, path, half, expected, rows)
        return
    if inner in EXPERTS:
        yield from _expert_places(file, path, inner, expected, _experts(tensor))
        return
    stem, _, end = inner.rpartition(".")
    if end not in ("weight", "bias"):
        stem, end = inner, ""
    place = _candidate(path, BLOCK.get(inner, ()), ("",), expected)
    if place is None:
        place = _candidate(
            path, BLOCK.get(stem, ()), (f".{end}",) if end else ("", ".weight"), expected
        )
    if place is None:
        raise _no_place(file, tensor)
    yield place[0], place[1], tensor


def _experts(tensor: GgufTensor) -> list[GgufTensor]:
    """The range of bytes of each expert in a tensor of all of them."""
    count = tensor.shape[0]
    size = tensor.size // count
    shape = tensor.shape[1:]
    return [
        replace(tensor, shape=shape, offset=tensor.offset + index * size, size=size)
        for index in range(count)
    ]


def _halves(file: GgufFile, tensor: GgufTensor) -> tuple[list[GgufTensor], list[GgufTensor]]:
    """The first and the second half of each expert's rows."""
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        raise _no_place(file, tensor)
    count, rows, columns = tensor.shape
    parts = _experts(replace(tensor, shape=(2 * count, rows // 2, columns)))
    return parts[::2], parts[1::2]


def _expert_places(
    file: GgufFile,
    path: str,
    inner: str,
    expected: Mapping[str, ExpectedTensor],
    experts: list[GgufTensor],
) -> Iterator[tuple[str, int, GgufTensor]]:
    """As `_places`, of the tensors of experts that a file names `inner`."""
    place = _candidate(path, EXPERTS[inner], ("",), expected)
    for index, expert in enumerate(experts):
        name = "" if place is None else place[0].format(index)
        if place is None or name not in expected:
            raise _no_place(file, expert)
        yield name, place[1], expert


def _candidate(
    path: str,
    names: tuple[str | Half, ...],
    ends: tuple[str, ...],
    expected: Mapping[str, ExpectedTensor],
) -> tuple[str, int] | None:
    """The first of `names` that is expected, for experts with `{}` in it, and which part of it."""
    for candidate in names:
        half = candidate if isinstance(candidate, Half) else Half(candidate, 0)
        for end in ends:
            name = f"{path}{half.name}{end}"
            if name.format(0) in expected:
                return name, half.number
    return None


def _outer_place(
    file: GgufFile, record: Architecture, expected: Mapping[str, ExpectedTensor], tensor: GgufTensor
) -> tuple[str, int, GgufTensor]:
    stem, _, end = tensor.name.rpartition(".")
    if tensor.name == _EMBEDDING:
        return record.embedding, 0, tensor
    if stem == "output":
        return HEAD_WEIGHT, 0, tensor
    if stem in ("output_norm", "token_embd_norm"):
        for name in record.outer_names:
            if name.endswith(f".{end}") and name in expected:
                return name, 0, tensor
    raise _no_place(file, tensor)


def _no_place(file: GgufFile, tensor: GgufTensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file.path.name}: tensor {tensor.name[:80]} has no place in a "
        f"{file.metadata['general.architecture']}; add the checkpoint as safetensors",
        field=tensor.name[:80],
        reason="UNEXPECTED_TENSOR",
    )


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise malformed(file.path.name, f"has no matrix {_EMBEDDING}", _EMBEDDING)
    return embedding.shape[0]


def _floats(file: GgufFile, name: str) -> tuple[float, ...]:
    """The numbers of a small tensor of float32; empty without it."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.type != "F32" or tensor.size > 4096:
        raise InvalidArgumentError(
            f"{file.path.name}: {name} must be a small list of float32", field=name
        )
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.offset)
        return struct.unpack(f"<{tensor.size // 4}f", stream.read(tensor.size))
