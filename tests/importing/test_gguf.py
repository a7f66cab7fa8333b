"""GGUF files: the weights that llama.cpp would compute with, the tokens of the same weights from
safetensors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.rotary import RotaryFrequencies
from edgeshard_agent.model.weights.packed_modules import unit_bytes
from edgeshard_agent.model.weights.weight_loading import units_of
from edgeshard_agent.model.weights.weights import StageWeights
from gguf import GGMLQuantizationType as Type

from bench.quantisation import VALIDATION, score
from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import parse_config, read_config
from edgeshard.domain.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedModelError,
)
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.importing import gguf_file
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_config import config_of
from edgeshard.importing.gguf_file import read_gguf
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.model_sources import Source, opened
from edgeshard.importing.outlook import config_of as outlook_config
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.storage.checkpoint import build_manifest, open_checkpoint
from tests.support import gguf_files
from tests.support.gguf_files import (
    DEMO,
    demo_weights,
    everywhere,
    gguf_name,
    mixed,
    permuted,
    write_demo_gguf,
)
from tests.support.imports import nothing, stage_of, tensors_of, write_checkpoint

HEADS = {"q_proj": 4, "k_proj": 2}


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Type], Path]:
    """The demo model with its matrices in a type, written once."""
    torch.set_num_threads(1)
    made: dict[Type, Path] = {}

    def get(kind: Type) -> Path:
        if kind not in made:
            made[kind] = write_demo_gguf(
                tmp_path_factory.mktemp(kind.name) / "demo.gguf", everywhere(kind)
            )
        return made[kind]

    return get


def as_dequantised(path: Path) -> dict[str, np.ndarray]:
    """What the gguf package makes of a file's tensors, by the names that the file has."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16, Type.BF16])
def test_weights_are_bit_for_bit_what_the_gguf_package_makes_of_them(
    kind: Type, file_of: Callable[[Type], Path], tmp_path: Path
) -> None:
    path = file_of(kind)
    expected = as_dequantised(path)
    imported = open_gguf(path, tmp_path, Width.INT8, nothing)
    manifest, source = tensors_of(imported)
    assert imported.notes == () and len(manifest.tensors) == len(expected)
    for tensor in manifest.tensors:
        found = whole(source.read(tensor.name)).float().numpy()
        part = tensor.name.split(".")[-2]
        if part in HEADS:
            found = permuted(found, HEADS[part])
        assert np.array_equal(found, expected[gguf_name(tensor.name)]), tensor.name
    stored = parse_config(manifest.config).stored_as
    assert stored == {Type.Q8_0: Quantisation.INT8, Type.Q4_0: Quantisation.INT4_HEAD_INT4}.get(
        kind
    )


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_the_same_weights_from_safetensors_give_the_same_logits(
    kind: Type, file_of: Callable[[Type], Path], tmp_path: Path
) -> None:
    path = file_of(kind)
    manifest, source = tensors_of(open_gguf(path, tmp_path, Width.INT8, nothing))
    config = json.loads((DEMO / "config.json").read_text())
    numbers = {tensor.name: whole(source.read(tensor.name)).float() for tensor in manifest.tensors}
    plain = write_checkpoint(tmp_path / "plain", config, numbers)
    expected = build_manifest("plain", open_checkpoint(plain))
    text = VALIDATION.read_text(encoding="utf-8")[:1000]
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        found = score(stage_of(manifest, source, dtype), text)
        assert found == score(stage_of(expected, SafetensorsDirectory(plain), dtype), text)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_integers_run_as_they_are_stored(
    kind: Type, file_of: Callable[[Type], Path], tmp_path: Path
) -> None:
    """The kernels round activations too; rounding weights a second time would cost as much as the
    first."""
    path = file_of(kind)
    manifest, source = tensors_of(open_gguf(path, tmp_path, Width.INT8, nothing))
    stored = parse_config(manifest.config).stored_as
    text = VALIDATION.read_text(encoding="utf-8")[:2500]
    reference, tokens = score(stage_of(manifest, source, DType.FLOAT32), text)
    packed = stage_of(manifest, source, DType.FLOAT32, stored)
    assert abs(math.exp((score(packed, text)[0] - reference) / tokens) - 1) < 0.003
    assert packed.parameter_bytes < 0.5 * stage_of(manifest, source, DType.FLOAT32).parameter_bytes
    numbers = whole(source.read("model.layers.0.mlp.down_proj.weight"))
    # One input at a time rounds to itself, so that products are the weights.
    first: Any = StageWeights.load(
        source,
        manifest.config,
        LayerRange(0, 1),
        dtype=DType.FLOAT32,
        device="cpu",
        quantisation=stored,
    ).modules
    assert torch.allclose(
        first.layers["0"].mlp.down(torch.eye(numbers.shape[1])).T, numbers, rtol=1e-6, atol=0
    )


def split(path: Path, count: int, folder: Path) -> list[Path]:
    """The parts that llama.cpp's own program makes of a file: tensors in turn, all other metadata
    in the first."""
    reader, paths = gguf.GGUFReader(path), []
    share = -(-len(reader.tensors) // count)
    for number in range(count):
        writer = gguf.GGUFWriter(folder / f"demo-{number + 1:05}-of-{count:05}.gguf", "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    kind = field.types[0]
                    inside = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), kind, inside)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(folder / f"demo-{number + 1:05}-of-{count:05}.gguf")
    return paths


def test_parts_are_the_model_that_the_whole_file_is(tmp_path: Path) -> None:
    whole_file = write_demo_gguf(tmp_path / "demo.gguf", mixed)
    parts = split(whole_file, 3, tmp_path)
    # As a Hub's cache has them: links, whose contents have other names in another folder.
    blobs, links = tmp_path / "blobs", tmp_path / "links"
    blobs.mkdir()
    links.mkdir()
    for number, part in enumerate(parts):
        part.rename(blobs / f"{number:064x}")
        (links / part.name).symlink_to(blobs / f"{number:064x}")
    expected = build_manifest("m", open_gguf(whole_file, tmp_path, Width.INT8, nothing).checkpoint)
    for part in parts:
        scratch = tmp_path / f"scratch-{part.stem}"
        scratch.mkdir()
        found = build_manifest(
            "m", open_gguf(links / part.name, scratch, Width.INT8, nothing).checkpoint
        )
        assert found.digest() == expected.digest(), "whichever part is named"
        assert Source(path=links / part.name).name == "demo"
    (links / parts[1].name).unlink()
    with pytest.raises(NotFoundError, match=r"demo-00002-of-00003\.gguf is missing .*; fetch it"):
        open_gguf(links / parts[0].name, tmp_path, Width.INT8, nothing)
    (links / parts[1].name).symlink_to(blobs / f"{2:064x}")
    with pytest.raises(InvalidArgumentError, match="is not part 2 of 3"):
        open_gguf(links / parts[0].name, tmp_path, Width.INT8, nothing)
    with pytest.raises(InvalidArgumentError, match="give all of them their names back"):
        open_gguf(blobs / f"{0:064x}", tmp_path, Width.INT8, nothing)


def test_one_part_of_one_is_whole(tmp_path: Path) -> None:
    (part,) = split(write_demo_gguf(tmp_path / "demo.gguf", mixed), 1, tmp_path)
    assert read_gguf(part).tensors.keys() == read_gguf(tmp_path / "demo.gguf").tensors.keys()


def test_each_tensor_keeps_its_type(tmp_path: Path) -> None:
    path = write_demo_gguf(tmp_path / "demo.gguf", mixed)
    expected = as_dequantised(path)
    imported = open_gguf(path, tmp_path, Width.INT8, nothing)
    manifest, source = tensors_of(imported)
    assert imported.notes == ()
    for tensor in manifest.tensors:
        found = whole(source.read(tensor.name)).float().numpy()
        part = tensor.name.split(".")[-2]
        if part in HEADS:
            found = permuted(found, HEADS[part])
        assert np.array_equal(found, expected[gguf_name(tensor.name)]), tensor.name
    shape = parse_config(manifest.config)
    assert shape.stored_as is Quantisation.STORED
    assert (
        shape.formats["embed_tokens.weight"]
        is shape.formats["layers.0.mlp.down_proj.weight"]
        is IntegerFormat.Q6_K
    )
    assert shape.format_of("layers.3.self_attn.o_proj.weight") is None
    planned = outlook_config(Source(path=path), Width.INT8)
    assert parse_config(planned) == shape, "a plan of the file knows the same formats"


def test_mixed_types_run_in_the_memory_of_the_file(tmp_path: Path) -> None:
    path = write_demo_gguf(tmp_path / "demo.gguf", mixed)
    manifest, source = tensors_of(open_gguf(path, tmp_path, Width.INT8, nothing))
    text = VALIDATION.read_text(encoding="utf-8")[:1000]
    reference, tokens = score(stage_of(manifest, source, DType.FLOAT32), text)
    packed = stage_of(manifest, source, DType.FLOAT32, Quantisation.STORED)
    assert abs(score(packed, text)[0] - reference) / tokens < 0.003
    stored = stage_of(manifest, source, DType.BFLOAT16, Quantisation.STORED)
    assert stored.parameter_bytes < 1.05 * sum(
        tensor.size for tensor in read_gguf(path).tensors.values()
    )


@pytest.mark.parametrize(
    "kind", [Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.TQ1_0, Type.TQ2_0], ids=lambda kind: kind.name
)
def test_other_types_are_kept_bit_for_bit(kind: Type, tmp_path: Path) -> None:
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(kind))
    expected = as_dequantised(path)
    imported = open_gguf(path, tmp_path, Width.INT8, nothing)
    manifest, source = tensors_of(imported)
    matrices = [tensor for tensor in manifest.tensors if tensor.integers == kind.name.lower()]
    assert len(matrices) > 20 and not any("became" in note for note in imported.notes)
    for tensor in [tensor for tensor in matrices if ".mlp." in tensor.name][:5]:
        found = whole(source.read(tensor.name)).float().numpy()
        assert np.array_equal(found, expected[gguf_name(tensor.name)]), tensor.name


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (144, "has the type IQ4_KS of ik_llama.cpp"),
        (158, "has the type IQ1_KT of ik_llama.cpp"),
        (212, "has Q4_K with the interleaved rows of ik_llama.cpp"),
        (339, "has IQ4_K with the interleaved rows of ik_llama.cpp"),
        (9, r"has a type that EdgeShard does not know \(9\)"),
    ],
)
def test_types_of_other_programs_are_refused_by_name(
    number: int, words: str, tmp_path: Path
) -> None:
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(Type.Q8_0))
    data = bytearray(path.read_bytes())
    place = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    data[place : place + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(
        UnsupportedModelError, match=rf"token_embd.weight {words}.*such as Q8_0 or Q4_K_M"
    ):
        read_gguf(path)


def test_a_tensor_that_is_missing_is_told_before_anything_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = demo_weights()
    del weights["model.layers.3.mlp.up_proj.weight"]
    monkeypatch.setattr(gguf_files, "demo_weights", lambda: weights)
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(Type.Q5_1))
    with pytest.raises(DataLossError, match=r"layers\.3\.mlp\.up_proj\.weight is missing"):
        open_gguf(path, tmp_path, Width.INT8, nothing)
    assert not (tmp_path / "converted.tensors").exists()


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match=r"'mamba'.*EdgeShard reads arcee, .*gemma3, .*qwen3"
    ):
        open_gguf(tmp_path / "x.gguf", tmp_path, Width.INT8, nothing)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"GGML", "does not begin as a GGUF file does"),
        (4, b"\1", "has version 1"),
        (8, b"\xff" * 8, "too many"),
        (16, b"\xff" * 8, "too many"),
        (24, b"\xff" * 8, "a text of"),
    ],
)
def test_what_a_header_says_is_held_against_limits(
    at: int, data: bytes, message: str, file_of: Callable[[Type], Path], tmp_path: Path
) -> None:
    whole_file = file_of(Type.Q4_0).read_bytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(whole_file[:at] + data + whole_file[at + len(data) :])
    with pytest.raises(InvalidArgumentError, match=message):
        read_gguf(path)


def test_lists_of_the_metadata_are_bounded_together(
    file_of: Callable[[Type], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(Type.Q4_0)
    lists = [value for value in read_gguf(path).metadata.values() if isinstance(value, list)]
    monkeypatch.setattr(gguf_file, "_VALUES_LIMIT", sum(map(len, lists)))
    read_gguf(path)
    monkeypatch.setattr(gguf_file, "_VALUES_LIMIT", sum(map(len, lists)) - 1)
    with pytest.raises(InvalidArgumentError, match="together"):
        read_gguf(path)


def test_a_truncated_file_is_told(file_of: Callable[[Type], Path], tmp_path: Path) -> None:
    data = file_of(Type.Q4_0).read_bytes()
    path = tmp_path / "short.gguf"
    for length in (0, 10, 30, 1000, 100_000, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DataLossError, match=r"short\.gguf ends before the end of"):
            read_gguf(path)


def config_from(
    path: Path, arch: str, tensors: dict[str, tuple[int, ...]], **metadata: Any
) -> dict[str, Any]:
    """The config.json of a file with this metadata and these tensors, all of them zeros."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        name = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for tensor, shape in tensors.items():
        values = np.zeros(shape, np.float32)
        if tensor == "rope_freqs.weight":
            values = frequencies({"rope_type": "default", "rope_theta": 500_000.0}) / frequencies(
                LLAMA3
            )
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config_of(read_gguf(path))


COMMON: dict[str, Any] = {
    "context_length": 8192,
    "embedding_length": 256,
    "block_count": 2,
    "feed_forward_length": 512,
    "attention__head_count": 4,
    "attention__head_count_kv": 2,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "rope__freq_base": 500_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def frequencies(rope: dict[str, Any]) -> np.ndarray:
    """Of heads of 64, as the agent computes them and its tests compare with transformers."""
    config = {**LLAMA, "rope_parameters": rope}
    decoder = read_config(config)
    assert decoder.architecture.rope is not None
    rotations = decoder.architecture.rope.rotations(decoder.fields, 64, 8192, 8192)
    return RotaryFrequencies(rotations).of("")[0].numpy()


LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
}


def test_rotary_factors_of_llama3_become_their_rule(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": (64, 256),
        "output.weight": (64, 256),
        "rope_freqs.weight": (32,),
    }
    config = config_from(tmp_path / "x.gguf", "llama", tensors, **COMMON)
    assert config["rope_parameters"] == LLAMA3 and config["tie_word_embeddings"] is False
    parse_config(config)


def test_gemma3_has_its_windows_and_its_two_rotary_bases(tmp_path: Path) -> None:
    metadata = {
        **COMMON,
        "attention__key_length": 128,
        "attention__value_length": 128,
        "attention__sliding_window": 1024,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 8.0,
    }
    config = config_from(
        tmp_path / "x.gguf", "gemma3", {"token_embd.weight": (64, 256)}, **metadata
    )
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    assert config["query_pre_attn_scalar"] == 128 and config["sliding_window"] == 1024
    assert parse_config(config).architecture == "gemma3"


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K, Type.BF16])
def test_nothing_is_copied_of_types_that_run_as_they_are(kind: Type, tmp_path: Path) -> None:
    """Rows of queries and keys, which llama.cpp reorders, are read in another order from the file
    itself."""
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(kind))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    imported = open_gguf(path, scratch, Width.INT8, nothing)
    assert {tensor.file for tensor in imported.checkpoint.tensors} == {path}
    written = sum(file.stat().st_size for file in scratch.iterdir())
    assert written == sum(file.size for file in imported.checkpoint.files), "the tokenizer only"


@pytest.mark.parametrize("choose", [mixed, *map(everywhere, (Type.Q4_K, Type.Q5_K, Type.Q6_K))])
def test_weights_take_the_memory_of_the_file_as_planned(
    choose: gguf_files.Choose, tmp_path: Path
) -> None:
    """In memory they are packed for the kernels, with padding and wider scales."""
    path = write_demo_gguf(tmp_path / "demo.gguf", choose)
    manifest, source = tensors_of(open_gguf(path, tmp_path, Width.INT8, nothing))
    layers = LayerRange(0, manifest.config["num_hidden_layers"])
    form = DType.BFLOAT16, Quantisation.STORED
    weights = StageWeights.load(
        source, manifest.config, layers, dtype=form[0], device="cpu", quantisation=form[1]
    )
    assert isinstance(weights.modules, DecoderModules)
    units = [unit_bytes(unit) for unit in units_of(weights.modules)]
    in_memory = sum(len(unit.small) + unit.large_bytes for unit in units if unit is not None)
    spec = model_from_config("demo", manifest.config)
    planned = sum(block.weight_bytes(*form) for block in spec.blocks) + spec.head_bytes(*form)
    planned += spec.embedding_bytes(*form) - spec.shared_bytes(*form)
    assert None not in units and abs(in_memory / planned - 1) < 0.02
    assert in_memory < 1.05 * sum(tensor.size for tensor in read_gguf(path).tensors.values())


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_what_is_made_of_a_file_is_as_readable_as_the_file(mode: int, tmp_path: Path) -> None:
    """The coordinator's user is often another one than the one who adds a model."""
    path = tmp_path / "model.gguf"
    # its norms are written anew
    shutil.copy(Path(__file__).parent / "gguf" / "unit_norms" / "model.gguf", path)
    path.chmod(mode)
    with opened(Source(path=path), Width.INT8, nothing) as imported:
        scratch = imported.checkpoint.scratch
        assert scratch is not None and {
            item.file.parent for item in imported.checkpoint.tensors
        } >= {scratch}
        assert scratch.stat().st_mode & 0o005 == (0o005 if mode & 0o004 else 0)
        assert all(file.stat().st_mode & 0o004 for file in scratch.iterdir())
