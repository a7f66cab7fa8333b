"""Headers by llama.cpp's converter (tools/make_gguf_headers.py): config.json and tensors of each
family's own model."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from edgeshard.architectures import read_config
from edgeshard.architectures.record import Fused
from edgeshard.architectures.registry import RECORDS
from edgeshard.architectures.tensors import canonical_name, expected_tensors
from edgeshard.domain.errors import EdgeShardError
from edgeshard.importing.gguf_config import config_of, targets_of
from edgeshard.importing.gguf_file import GgufFile, GgufTensor
from tests.agent.model.families import VARIANTS

HEADERS: dict[str, Any] = json.loads((Path(__file__).parent / "gguf" / "headers.json").read_text())
WINDOWS = ("dots1", "mixtral", "qwen2_moe", "qwen3_moe", "starcoder2")
"""Families whose windows llama.cpp does not have."""
DIFFERENT = {
    # multiplied into the weights
    "falcon_h1-norm-first": {
        "ends.embedding_scale",
        "ends.logit_divisor",
    },
    "gemma-plain": {"rotations..theta"},  # llama.cpp has the base of the published models
    # scaling: of heads, as in the published models
    "gemma2-capped": {
        "rotations..theta",
        "scaling",
    },
    # each sixth layer is full, as in the published models
    "gemma3-text": {
        "scaling",
        "rotary",
        "windows",
    },
    "gemma4-dense": {"partial_rotary_factor"},  # of an odd number of frequencies
}
UNREAD = {
    "architecture",
    "eos_tokens",
    "max_context",
    "rope_theta",
    "mrope_section",
    "mrope_interleaved",
}
TILED = "tiled_heads"
"""Value heads of the gated delta rule stay in llama.cpp's order."""


def file_of(row: dict[str, Any], directory: Path) -> GgufFile:
    """The header of a row as a file whose rotary factors are its only bytes."""
    path = directory / "model.gguf"
    tensors = {}
    end = 0
    data = b""
    for text, layers in row["tensors"].items():
        stem, shape = re.fullmatch(r"(\S+) (\[.*\])", text).groups()  # type: ignore[union-attr]
        for layer in layers:
            name = stem.replace("*", str(layer))
            size = 4 * math.prod(json.loads(shape))
            offset = end
            if name in row["factors"]:
                offset = len(data)
                data += struct.pack(f"<{size // 4}f", *row["factors"][name])
            tensors[name] = GgufTensor(name, "F32", tuple(json.loads(shape)), offset, size, path)
            end += size
    path.write_bytes(data)
    return GgufFile(path, row["metadata"], tensors)


def original_config(name: str) -> dict[str, Any]:
    config = VARIANTS[name].library_config()
    for key, value in HEADERS[name]["changes"].items():
        setattr(config, key, value)
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def computation(config: dict[str, Any]) -> dict[str, Any]:
    """All that decides what a model computes, besides its tensors."""
    decoder = read_config(config)
    record = decoder.architecture
    fields = decoder.fields
    shape = decoder.shape
    found: dict[str, Any] = {
        "shape": dataclasses.asdict(shape),
        "ends": dataclasses.asdict(record.ends(fields, shape)),
    }
    if isinstance(record.runs, Fused):
        styles = [record.runs.style(fields, shape, layer) for layer in range(shape.layer_count)]
        found["styles"] = [dataclasses.asdict(style) for style in styles]
    if record.rope is not None and record.rope.turns(fields):
        rotations = record.rope.rotations(
            fields, shape.head_dim, shape.max_context, shape.max_context
        )
        found["rotations"] = {
            kind: dataclasses.asdict(rotation) for kind, rotation in rotations.items()
        }
    if record.windows is not None:
        found["windows"] = list(record.windows.sizes(fields, shape.layer_count))
    return found


def differences(a: Any, b: Any, path: str = "") -> set[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        found: set[str] = set()
        for key in {*a, *b}:
            found |= differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return set().union(*(differences(x, y, path) for x, y in zip(a, b, strict=True)))
    if isinstance(a, float) and isinstance(b, float | int) and math.isclose(a, b, rel_tol=1e-6):
        return set()
    return set() if a == b else {path}


@pytest.mark.parametrize("name", HEADERS)
def test_config_json_computes_as_the_model_s_own(name: str, tmp_path: Path) -> None:
    config = config_of(file_of(HEADERS[name], tmp_path))
    found = differences(computation(original_config(name)), computation(config))
    allowed = (
        DIFFERENT.get(name, set())
        | UNREAD
        | {TILED}
        | ({"windows"} if name.startswith(WINDOWS) else set())
    )
    unexpected = {path for path in found if not any(path.endswith(end) for end in allowed)}
    assert not unexpected


@pytest.mark.parametrize("name", HEADERS)
def test_each_tensor_has_its_place_and_none_is_missing(name: str, tmp_path: Path) -> None:
    file = file_of(HEADERS[name], tmp_path)
    config = config_of(file)
    targets = targets_of(file, config)
    assert targets.left_out == []
    architecture = read_config(config).architecture.name
    found = {canonical_name(architecture, target.name): target.shape for target in targets.tensors}
    own = original_config(name)
    expected = {tensor: entry.shape for tensor, entry in expected_tensors(own).items()}
    if any("in_proj_qkvz" in tensor for tensor in expected):  # files have it as two
        assert {tensor for tensor in expected if "in_proj_qkvz" not in tensor} < found.keys()
    else:
        assert found == expected


HOSTILE: list[Any] = [
    0,
    -1,
    1,
    3,
    2**31,
    2**63 - 1,
    True,
    "x",
    [],
    [0],
    [1, 2],
    ["a"],
    None,
    1.5,
    math.nan,
    math.inf,
]
SHAPES = [(1,), (2**30, 1), (2**30, 2, 2), (3, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_hostile_metadata_and_shapes_are_refused_by_name(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(60):
        row = HEADERS[chance.choice(list(HEADERS))]
        file = file_of(row, tmp_path)
        metadata, tensors = dict(file.metadata), dict(file.tensors)
        key = chance.choice([key for key in metadata if not key.startswith("general.")])
        metadata[key] = chance.choice(HOSTILE)
        name = chance.choice(list(tensors))
        if chance.random() < 0.5:
            tensors[name] = dataclasses.replace(tensors[name], shape=chance.choice(SHAPES))
        changed = GgufFile(file.path, metadata, tensors)
        try:
            targets_of(changed, config_of(changed))
        except EdgeShardError as error:
            assert error.field or error.reason
            refused += 1
    assert refused > 20


def test_every_family_of_the_registry_that_is_read_has_a_row() -> None:
    covered = {read_config(original_config(name)).architecture.name for name in HEADERS}
    read = {name for name, record in RECORDS.items() if record.gguf is not None}
    others = {
        "exaone",  # transformers has no class
        "hunyuan_v1_moe",  # the converter needs the scaling of the published models
        "mistral",  # of files with the name mistral3; others are llama's
        "qwen2_5_vl",  # as qwen2_vl
        "glm4v_moe",  # as glm4_moe
        "qwen3_vl_moe",  # as qwen3_moe
    }
    assert read - covered <= others
