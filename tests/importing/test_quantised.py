"""Checkpoints that others quantised: the numbers that they mean, and the text that they write."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.stage import StageModel
from safetensors.torch import load_file

from bench.quantisation import VALIDATION, score
from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import expected_tensors, held_bytes, parse_config
from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
    UnsupportedModelError,
)
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.importing import packings, quantised
from edgeshard.importing.blocks import TensorWriter, Width
from edgeshard.importing.imported import Imported
from edgeshard.importing.model_sources import open_directory
from edgeshard.importing.quantised import Converter, read_array, sorted_parts
from edgeshard.storage.checkpoint import (
    StoredTensor,
    build_manifest,
    open_checkpoint,
    stored_tensors,
)
from edgeshard.storage.model_directory import ModelDirectory
from tests.support.gguf_files import DEMO
from tests.support.imports import nothing, stage_of, tensors_of, write_checkpoint
from tests.support.quantised import FORMATS, fp4

_MATRIX = re.compile(r"layers\.\d+\.(self_attn|mlp)\..*_proj\.weight")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}


def demo_config(**more: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    return config | more


Written = tuple[Path, dict[str, torch.Tensor]]
"""A quantised checkpoint, and the numbers that it means."""


@pytest.fixture
def written(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Callable[[str], Written]:
    def write(name: str) -> Written:
        settings, quantise, _ = FORMATS[name]
        stored, means = {}, {}
        for tensor, weight in weights.items():
            if not _MATRIX.search(tensor):
                stored[tensor] = means[tensor] = weight.bfloat16()
                continue
            made = quantise(weight)
            means[tensor] = made.means
            stem = tensor.removesuffix("weight")
            stored |= {stem + end: part for end, part in made.parts.items()}
        directory = write_checkpoint(
            tmp_path / "quantised", demo_config(quantization_config=settings), stored
        )
        return directory, means

    return write


def opened(directory: Path, tmp_path: Path, width: Width = Width.INT8) -> Imported:
    scratch = tmp_path / f"scratch-{width}"
    scratch.mkdir()
    return open_directory(directory, scratch, width, nothing)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(3)
def test_perplexity_is_that_of_the_dequantised_weights(
    name: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    directory, means = written(name)
    exact = FORMATS[name][2]
    imported = opened(directory, tmp_path)
    manifest, source = tensors_of(imported)
    for tensor in manifest.tensors:
        found, expected = whole(source.read(tensor.name)).float(), means[tensor.name].float()
        error = float((found - expected).norm() / expected.norm())
        assert error == 0 if exact else error < 0.01, tensor.name
    assert any("became" in note for note in imported.notes) is not exact
    stored = parse_config(manifest.config).stored_as
    assert stored is not None and "quantization_config" not in manifest.config
    plain = write_checkpoint(tmp_path / "plain", demo_config(), means)
    text = VALIDATION.read_text(encoding="utf-8")[:900]
    reference = stage_of(
        build_manifest("plain", open_checkpoint(plain)), SafetensorsDirectory(plain), DType.FLOAT32
    )
    expected_nats, tokens = score(reference, text)
    nats, _ = score(stage_of(manifest, source, DType.BFLOAT16, stored), text)
    assert abs(math.exp((nats - expected_nats) / tokens) - 1) < 0.01


@pytest.mark.parametrize("name", ["compressed-tensors int4 asymmetric", "awq", "gptq int4 v2"])
def test_zero_points_do_not_cost_bits(
    name: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    directory, means = written(name)
    manifest, source = tensors_of(opened(directory, tmp_path))
    matrices = [tensor for tensor in manifest.tensors if _MATRIX.search(tensor.name)]
    assert {tensor.integers for tensor in matrices} == {IntegerFormat.INT4_ZEROS}
    stored_as = parse_config(manifest.config).stored_as
    assert stored_as is Quantisation.STORED
    stage = stage_of(manifest, source, DType.BFLOAT16, stored_as)
    assert all(
        torch.equal(whole(source.read(part.name)), means[part.name]) for part in matrices[:3]
    )
    assert stage.parameter_bytes < 0.62 * sum(
        2 * math.prod(tensor.shape) for tensor in manifest.tensors
    )


@pytest.mark.parametrize(
    ("method", "settings", "low", "expected"),
    [
        ("gptq", {"sym": True}, -8, IntegerFormat.INT4),
        ("gptq", {"sym": False}, -8, IntegerFormat.INT4_ZEROS),
        ("gptq", {}, -12, IntegerFormat.INT8),
        ("awq", {}, -12, IntegerFormat.INT4_ZEROS),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": {"symmetric": False}}}},
            0,
            IntegerFormat.INT4_ZEROS,
        ),
    ],
)
def test_experts_of_a_layer_have_one_format(
    method: str, settings: dict[str, Any], low: int, expected: IntegerFormat, tmp_path: Path
) -> None:
    """What settings call for decides, not what the values of one of them need."""
    values = np.full((2, 64), low, np.int8)
    values[:, ::2] += 7
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with TensorWriter(tmp_path, 0) as writer:
        assert (
            Converter({}, method, settings, Width.INT8, writer)._narrowest(name, values) is expected
        )


def logits_of(stage: StageModel, tokens: np.ndarray) -> torch.Tensor:
    """Of a prompt in one chunk, [tokens, vocabulary]."""
    span = Span(0, 0, len(tokens), sampling=Sampling())
    return stage.logits(StepPlan(grants=(KvGrant(0, 0, (0, 1)),), spans=(span,)), tokens)


def mxfp4_parts(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks and scales of an expert's matrix [outputs, inputs], as gpt_oss has them, and the
    numbers they mean."""
    rows, columns = weight.shape
    codes, exponents, means = fp4(weight)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {
        "_blocks": packed.view(rows, columns // 32, 16),
        "_scales": exponents.view(rows, columns // 32),
    }, means


def test_an_expert_in_mxfp4_whose_scales_float16_does_not_hold_is_transposed_and_exact(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    made, means = mxfp4_parts(torch.randn(8, 64) * 2.0**-40)
    parts = {f"x{end}": part for end, part in made.items()}
    directory = write_checkpoint(tmp_path / "experts", {}, parts)
    kept, modules = sorted_parts(stored_tensors(ModelDirectory.at(directory)))
    assert not kept and modules.keys() == {"x"}
    with TensorWriter(tmp_path, 0) as writer:
        stored = Converter({}, "mxfp4", {}, Width.INT8, writer).stored("x", modules["x"])
    assert stored.shape == (64, 8) and writer.loss.errors == 0
    assert torch.equal(torch.from_numpy(read_array(stored)), means.t())


def test_gpt_oss_as_published_is_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts of a layer in a tensor of blocks and one of scales: they are read one by one, and
    kept as int8."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    config = {"model_type": "gpt_oss", "vocab_size": 61, "max_position_embeddings": 64} | sizes
    torch.manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    means: dict[str, torch.Tensor] = {}
    experts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for name, tensor in expected_tensors(config).items():
        full = f"model.{name}" if name != "lm_head.weight" else name
        weight = torch.randn(tensor.shape) * 0.1
        together, number = re.subn(r"experts\.\d+\.", "experts.", full)
        if not number:
            stored[full] = means[full] = weight.bfloat16()
        elif full.endswith("_bias"):
            means[full] = weight.bfloat16()
            experts[together].append(means[full])
        else:
            weight[:32] = 0.0  # blocks of nothing, whose scales mean nothing either
            parts, means[full] = mxfp4_parts(weight.t().contiguous())
            for end, part in parts.items():
                experts[together + end].append(part)
    stored |= {name: torch.stack(parts) for name, parts in experts.items()}
    directory = write_checkpoint(
        tmp_path / "oss", config | {"quantization_config": {"quant_method": "mxfp4"}}, stored
    )
    sizes_read: list[int] = []

    def noting(part: StoredTensor) -> Any:
        sizes_read.append(part.size)
        return read_array(part)

    monkeypatch.setattr(quantised, "read_array", noting)
    imported = open_directory(directory, tmp_path, Width.INT8, nothing)
    assert max(sizes_read) == 192 * 64 // 2, "one expert's gate and up"
    manifest, source = tensors_of(imported)
    assert {tensor.name for tensor in manifest.tensors} == means.keys()
    for info in manifest.tensors:
        assert (info.integers is IntegerFormat.INT8) == info.name.endswith(
            ("gate_up_proj", "down_proj")
        )
        assert torch.equal(whole(source.read(info.name)).float(), means[info.name].float()), (
            info.name
        )
    means |= {
        name: part.t().contiguous()
        for name, part in means.items()
        if name.endswith(("gate_up_proj", "down_proj"))
    }
    plain = write_checkpoint(tmp_path / "plain", config, means)
    reference = stage_of(
        build_manifest("plain", open_checkpoint(plain)), SafetensorsDirectory(plain), DType.FLOAT32
    )
    tokens = np.arange(20) * 3 % 61
    wanted = logits_of(reference, tokens)
    assert torch.equal(logits_of(stage_of(manifest, source, DType.FLOAT32), tokens), wanted), (
        "whole again"
    )
    stage = stage_of(manifest, source, DType.FLOAT32, parse_config(manifest.config).stored_as)
    assert (
        torch.corrcoef(torch.stack([logits_of(stage, tokens).flatten(), wanted.flatten()]))[0, 1]
        > 0.999
    )
    layers = LayerRange(0, 2)
    kept = parse_config(manifest.config).stored_as
    assert stage.parameter_bytes == held_bytes(
        manifest.config, manifest.tensors, layers, DType.FLOAT32, kept
    )


def test_experts_of_a_layer_in_fp8_are_read_one_by_one(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 32,
        "moe_intermediate_size": 128,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    config = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 61,
        "max_position_embeddings": 64,
    } | sizes
    torch.manual_seed(0)
    settings, quantise, _ = FORMATS["fp8 in blocks"]
    stored = {
        name if name == "lm_head.weight" else f"model.{name}": torch.randn(tensor.shape).bfloat16()
        for name, tensor in expected_tensors(config).items()
        if ".experts." not in name
    }
    means, path = {}, "model.layers.0.mlp.experts"
    for together, rows in (("gate_up_proj", 256), ("down_proj", 128)):
        made = [quantise(torch.randn(rows, 128)) for _ in range(3)]
        stored[f"{path}.{together}"] = torch.stack([each.parts["weight"] for each in made])
        stored[f"{path}.{together}_activation_scale"] = torch.ones(3)
        stored[f"{path}.{together}_scale_inv"] = torch.stack(
            [each.parts["weight_scale_inv"] for each in made]
        )
        for expert, each in enumerate(made):
            names = ("gate_proj", "up_proj") if rows == 256 else ("down_proj",)
            for name, part in zip(names, each.means.chunk(len(names)), strict=True):
                means[f"{path}.{expert}.{name}.weight"] = part
    directory = write_checkpoint(
        tmp_path / "fp8", config | {"quantization_config": settings}, stored
    )
    manifest, source = tensors_of(open_directory(directory, tmp_path, Width.FLOAT32, nothing))
    assert len(manifest.tensors) == len(expected_tensors(config))
    for name, wanted in means.items():
        found = source.read(name)
        assert isinstance(found, torch.Tensor) and torch.equal(found, wanted), name


def test_blocks_of_fp8_beside_what_was_not_converted(tmp_path: Path) -> None:
    """As minimax_m2 has them: all but routers, their biases and the head."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 32,
        "intermediate_size": 96,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    config = {
        "model_type": "minimax_m2",
        "vocab_size": 61,
        "rotary_dim": 16,
        "max_position_embeddings": 64,
    } | sizes
    torch.manual_seed(0)
    settings, quantise, _ = FORMATS["fp8 in blocks"]
    stored, means = {}, {}
    for name, tensor in expected_tensors(config).items():
        full = f"model.{name}" if name != "lm_head.weight" else name
        weight = torch.randn(tensor.shape) * 0.1
        if not re.search(r"_proj\.weight|experts", name):
            stored[full] = means[full] = weight.bfloat16()
            continue
        made = quantise(weight)
        means[full] = made.means
        stored |= {full.removesuffix("weight") + end: part for end, part in made.parts.items()}
    left = {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    given = config | {
        "quantization_config": settings | left,
        "auto_map": {"AutoConfig": "x.Config"},
    }
    imported = opened(write_checkpoint(tmp_path / "fp8", given, stored), tmp_path)
    manifest, source = tensors_of(imported)
    assert {tensor.name for tensor in manifest.tensors} == set(
        means
    ) and "(auto_map)" in imported.notes[0]
    for name, expected in means.items():
        found = whole(source.read(name)).float()
        assert (found - expected.float()).norm() < 0.01 * expected.float().norm(), name
    stage_of(manifest, source, DType.BFLOAT16, parse_config(manifest.config).stored_as)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not read; EdgeShard reads compressed-tensors, awq",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ is read as version gemm"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "sparse-24",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "compressed-tensors", "transform_config": {"x": 1}}, "transform_config"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "'bitsandbytes' is not read"),
        ({"group_size": 64, "bits": 4}, "quantization_config is of MLX"),
        ({"group_size": 32, "bits": 8, "mode": "affine"}, "quantization_config is of MLX"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before any weight is looked at: there are none."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(demo_config(quantization_config=settings)))
    with pytest.raises(UnsupportedModelError, match=message):
        open_directory(directory, tmp_path, Width.INT8, nothing)


@pytest.mark.parametrize(
    ("parts", "program"),
    [
        (
            {
                "weight": torch.zeros(96, 8, dtype=torch.uint32),
                "scales": torch.zeros(96, 1),
                "biases": torch.zeros(96, 1),
            },
            "MLX",
        ),
        (
            {
                "weight": torch.zeros(3072, 1, dtype=torch.uint8),
                "weight.absmax": torch.zeros(96, dtype=torch.uint8),
                "weight.quant_state.bitsandbytes__nf4": torch.zeros(8, dtype=torch.uint8),
            },
            "bitsandbytes",
        ),
        (
            {"weight": torch.zeros(96, 64, dtype=torch.int8), "SCB": torch.zeros(96)},
            "bitsandbytes",
        ),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_layouts_of_other_programs_are_refused_by_name(
    parts: dict[str, torch.Tensor], program: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Also if config.json does not say so."""
    stored = {f"model.layers.0.mlp.up_proj.{end}": part for end, part in parts.items()}
    directory = write_checkpoint(tmp_path / "model", demo_config(**settings), stored)
    with pytest.raises(
        UnsupportedModelError, match=f"that {program} quantised, which are not read"
    ):
        open_directory(directory, tmp_path, Width.INT8, nothing)


def test_the_key_of_mlx_is_refused_by_name(tmp_path: Path) -> None:
    config = demo_config(quantization={"group_size": 64, "bits": 4, "model.embed_tokens": False})
    directory = write_checkpoint(tmp_path / "model", config, {"x": torch.zeros(1)})
    with pytest.raises(UnsupportedModelError, match="quantization is of MLX"):
        open_directory(directory, tmp_path, Width.INT8, nothing)


def test_scales_of_activations_are_not_used(
    written: Callable[[str], Written], tmp_path: Path
) -> None:
    """As Mistral publishes FP8: a scale of the inputs next to each matrix."""
    directory, means = written("fp8 in blocks")
    tensors = load_file(directory / "model.safetensors")
    stems = [
        name.removesuffix("weight_scale_inv")
        for name in tensors
        if name.endswith("weight_scale_inv")
    ]
    more = {f"{stem}activation_scale": torch.tensor(0.02) for stem in stems}
    settings = FORMATS["fp8 in blocks"][0]
    write_checkpoint(tmp_path / "static", demo_config(quantization_config=settings), tensors | more)
    imported = opened(tmp_path / "static", tmp_path)
    assert {tensor.name for tensor in imported.checkpoint.tensors} == means.keys()
    assert any(
        re.search(r"its weights grow from .* to .* MiB in the store", note)
        for note in imported.notes
    )


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model.layers.0.mlp.up_proj.new_scale": torch.zeros(1)}, InvalidArgumentError),
        ({"model.layers.3.mlp.up_proj.weight": None}, DataLossError),
    ],
)
def test_names_are_checked_before_anything_is_converted(
    changed: dict[str, Any],
    error: type[EdgeShardError],
    written: Callable[[str], Written],
    tmp_path: Path,
) -> None:
    directory, _ = written("compressed-tensors int8")
    tensors = {**load_file(directory / "model.safetensors"), **changed}
    if None in changed.values():
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(next(iter(changed))[:-6])
        }
    settings = FORMATS["compressed-tensors int8"][0]
    write_checkpoint(tmp_path / "other", demo_config(quantization_config=settings), tensors)
    with pytest.raises(error, match=re.escape(next(iter(changed)))):
        open_directory(tmp_path / "other", tmp_path, Width.INT8, refuse_progress)


def refuse_progress(what: str, done: int, total: int) -> None:
    raise AssertionError(f"{what} began")


def test_another_width_may_be_chosen(written: Callable[[str], Written], tmp_path: Path) -> None:
    directory, means = written("fp8 in blocks")
    imported = opened(directory, tmp_path, Width.BFLOAT16)
    manifest, source = tensors_of(imported)
    assert parse_config(manifest.config).stored_as is None
    name = "model.layers.0.mlp.down_proj.weight"
    assert (
        torch.equal(whole(source.read(name)), means[name].bfloat16())
        and "became bfloat16" in imported.notes[0]
    )


@pytest.mark.parametrize("name", ["compressed-tensors int4", "awq", "gptq int4", "fp8 in blocks"])
def test_parts_that_contradict_one_another_are_refused(
    name: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    directory, _ = written(name)
    tensors = load_file(directory / "model.safetensors")
    part = next(
        key for key in tensors if key.endswith(("weight_scale", "scales", "weight_scale_inv"))
    )
    write_checkpoint(tmp_path / "broken", demo_config(quantization_config=FORMATS[name][0]), {
        **tensors, part: tensors[part][..., :-1]
    })  # fmt: skip
    with pytest.raises(EdgeShardError) as caught:
        opened(tmp_path / "broken", tmp_path)
    assert caught.value.field.startswith("model.layers.")


INT32 = torch.int32
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "a word that is no matrix": (
        "awq", {}, {"qweight": torch.ones((), dtype=INT32),
                    "qzeros": torch.ones((1, 1), dtype=INT32), "scales": torch.ones(1, 8)},
    ),
    "words that are no integers": (
        "awq", {}, {"qweight": torch.ones(32, 1), "qzeros": torch.ones(1, 1),
                    "scales": torch.ones(1, 8)},
    ),
    "no groups": (
        "gptq", {}, {"qweight": torch.ones((4, 8), dtype=INT32),
                     "qzeros": torch.ones((0, 1), dtype=INT32), "scales": torch.ones(0, 8)},
    ),
    "zero points in no shape": (
        "compressed-tensors", {}, {"weight": torch.ones((8, 32), dtype=torch.int8),
                                   "weight_scale": torch.ones(8, 1),
                                   "weight_zero_point": torch.ones(7, dtype=torch.int8)},
    ),
    "experts without a size": (
        "mxfp4", {}, {"_blocks": torch.ones((0, 2, 16), dtype=torch.uint8),
                      "_scales": torch.ones((0, 2), dtype=torch.uint8)},
    ),
    "experts that are no numbers": (
        "mxfp4", {}, {"_blocks": torch.full((8, 2, 16), 0x77, dtype=torch.uint8),
                      "_scales": torch.full((8, 2), 255, dtype=torch.uint8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_any_shape_and_type_are_refused_by_name(name: str, tmp_path: Path) -> None:
    method, settings, parts = PARTS[name]
    named = {key if key.startswith("_") else f".{key}": part for key, part in parts.items()}
    directory = write_checkpoint(
        tmp_path / "odd", {}, {f"x{key}": part for key, part in named.items()}
    )
    _, modules = sorted_parts(stored_tensors(ModelDirectory.at(directory)))
    ((module, found),) = modules.items()
    with TensorWriter(tmp_path, 0) as writer, pytest.raises(InvalidArgumentError) as caught:
        Converter({}, method, settings, Width.BFLOAT16, writer).stored(module, found)
    assert caught.value.field == module and caught.value.reason == "MALFORMED_CHECKPOINT"


def test_blocks_larger_than_the_matrix_take_no_more_memory_than_it(tmp_path: Path) -> None:
    """As config.json may say: a scale is repeated for as many rows as there are."""
    parts = {
        "weight": np.ones((4, 8), np.float32),
        "weight_scale_inv": np.array([[2.0, 3.0]], np.float32),
    }
    matrix = packings.floats((10**15, 4))("x", parts)
    assert matrix.scales.tolist() == [[2.0] * 4 + [3.0] * 4] * 4
