"""Published layouts of quantised mixtures: their names, types and shapes lead to the model's
tensors, with their numbers.

A file of `layouts` has each tensor once, with `{layer}` and `{expert}` in its name, and the
settings in config.json. Where it says `put_together`, no header of the repository was found, and it
is what the library writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from numpy.typing import NDArray

from edgeshard.architectures import expected_tensors, parse_config
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard.domain.models.model import TensorInfo
from edgeshard.importing import packings
from edgeshard.importing.blocks import TensorWriter, Width
from edgeshard.importing.model_sources import open_directory
from edgeshard.importing.quantised import (
    Converter,
    check_method,
    sorted_parts,
    without_quantisation,
)
from edgeshard.storage.checkpoint import stored_tensors
from edgeshard.storage.locations import BlobLocation, read_chunks
from edgeshard.storage.model_directory import ModelDirectory
from tests.support.imports import nothing, tensors_of, write_checkpoint
from tests.support.quantised import Quantised, compressed_nvfp4, fp8, modelopt_nvfp4, pack_quantised

LAYOUTS = Path(__file__).parent / "layouts"
PUBLISHED = Path(__file__).parents[1] / "architectures" / "published"
WHOLE_MODELS = sorted(path.stem for path in LAYOUTS.glob("qwen3-*.json"))
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4, "I64": 8}
NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
UNREAD = {"input_scale", "input_global_scale", "k_scale", "v_scale"}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 61,
}
Parts = dict[str, tuple[str, list[int]]]


def layout_of(name: str) -> dict[str, Any]:
    layout: dict[str, Any] = json.loads((LAYOUTS / f"{name}.json").read_text(encoding="utf-8"))
    return layout


def config_of(layout: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        (PUBLISHED / f"{layout['config']}.json").read_text(encoding="utf-8")
    )
    return config | {"quantization_config": layout["settings"]}


def stored_name(tensor: str) -> str:
    return tensor if tensor == "lm_head.weight" else f"model.{tensor}"


def parts_of(layout: dict[str, Any], tensor: str) -> Parts:
    """The types and shapes of what stands for the model's tensor of this name, by the ends of their
    names."""
    name = re.sub(
        r"experts\.\d+", "experts.{expert}", re.sub(r"layers\.\d+", "layers.{layer}", tensor)
    )
    stem = name.removesuffix("weight")
    return {
        end: (dtype, shape)
        for full, (dtype, shape) in layout["tensors"].items()
        if (end := full.removeprefix(stem)) != full and "." not in end
    }


def whole_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of the matrix that is packed."""
    dtype, shape = parts["weight_packed" if "weight_packed" in parts else "weight"]
    return (*shape[:-1], shape[-1] * {"U8": 2, "I32": 8}.get(dtype, 1))


def quantised_as(layout: dict[str, Any], parts: Parts, weight: torch.Tensor) -> Quantised:
    """A weight in the form of these parts."""
    if parts.keys() <= {"weight"} | UNREAD:
        return Quantised({"weight": weight.bfloat16()}, weight.bfloat16().float())
    if "weight_shape" in parts:
        group = layout["settings"]["config_groups"]["group_0"]["weights"]["group_size"]
        return pack_quantised(4, group, torch.bfloat16)(weight)
    if "weight_packed" in parts:
        return compressed_nvfp4(weight)
    return (
        modelopt_nvfp4(weight)
        if "weight_scale_2" in parts
        else fp8(128, "weight_scale_inv", torch.bfloat16)(weight)
    )


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_each_tensor_of_the_model_has_its_parts_and_there_are_no_others(name: str) -> None:
    layout = layout_of(name)
    config = without_quantisation(config_of(layout))
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    count = size = 0
    for tensor, (dtype, shape) in layout["tensors"].items():
        many = (layers if "{layer}" in tensor else 1) * (experts if "{expert}" in tensor else 1)
        count, size = count + many, size + many * BYTES[dtype] * math.prod(shape)
    assert count == layout.get("count", count) and size == layout.get("bytes", size), (
        "as its headers say"
    )
    used = 0
    for tensor in expected_tensors(config | {"num_hidden_layers": 1}).values():
        parts = parts_of(layout, stored_name(tensor.name))
        assert whole_shape(parts) == tensor.shape, tensor.name
        used += len(parts) if ".experts." not in tensor.name or ".experts.0." in tensor.name else 0
    assert used == len(layout["tensors"])


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_its_numbers_are_those_that_its_parts_mean(name: str, tmp_path: Path) -> None:
    """Integers are the same; other numbers are the nearest in bfloat16, or near as small
    integers."""
    layout = layout_of(name)
    config = config_of(layout) | TINY
    torch.manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    means: dict[str, torch.Tensor] = {}
    for tensor in expected_tensors(without_quantisation(config)).values():
        full = stored_name(tensor.name)
        parts = parts_of(layout, full)
        made = quantised_as(layout, parts, torch.randn(tensor.shape) * 0.1)
        found = made.parts | {
            end: torch.ones(shape) for end, (_, shape) in parts.items() if end in UNREAD
        }
        assert {end: NAMES[part.dtype] for end, part in found.items()} == {
            end: kind for end, (kind, _) in parts.items()
        }
        means[full] = made.means
        stored |= {full.removesuffix("weight") + end: part for end, part in found.items()}
    directory = write_checkpoint(tmp_path / "model", config, stored)
    are_integers = "w4a16" in name
    for width, bound in ((Width.BFLOAT16, 0.0), (Width.INT8, 0.01), (Width.INT4, 0.12)):
        (tmp_path / width).mkdir()
        manifest, source = tensors_of(open_directory(directory, tmp_path / width, width, nothing))
        assert {tensor.name for tensor in manifest.tensors} == means.keys()
        kept = parse_config(manifest.config).stored_as
        assert (kept is None) == (width is Width.BFLOAT16 and not are_integers)
        for info in manifest.tensors:
            numbers, wanted = whole(source.read(info.name)).float(), means[info.name]
            if width is Width.BFLOAT16 and not are_integers:
                wanted = wanted.bfloat16().float()
            error = float((numbers - wanted).norm() / wanted.norm())
            assert error <= (0 if are_integers else bound), (info.name, width, error)


def test_experts_of_kimi_k2_are_the_same_integers(tmp_path: Path) -> None:
    """The family is not run, but its form is that of others: groups of 32, the shape as int32, the
    rest as it is."""
    layout = layout_of("kimi-k2-thinking")
    stored: dict[str, torch.Tensor] = {}
    means: dict[str, torch.Tensor] = {}
    for tensor, (dtype, shape) in layout["tensors"].items():
        if tensor.endswith(".weight"):
            stored[tensor] = torch.ones(8, 8).bfloat16()
        if not tensor.endswith(".weight_packed"):
            continue
        module = tensor.removesuffix("_packed")
        parts = parts_of(layout, module)
        made = quantised_as(
            layout, parts, torch.randn(16, 128, generator=torch.Generator().manual_seed(len(means)))
        )
        means[module] = made.means
        made.parts["weight_shape"] = made.parts["weight_shape"].int()
        assert {end: NAMES[part.dtype] for end, part in made.parts.items()} == {
            end: kind for end, (kind, _) in parts.items()
        }
        assert dtype == "I32" and parts["weight_scale"][1] == [shape[0], shape[1] * 8 // 32]
        stored |= {
            f"{module.removesuffix('weight')}{end}": part for end, part in made.parts.items()
        }
    directory = write_checkpoint(tmp_path / "experts", {}, stored)
    kept, modules = sorted_parts(stored_tensors(ModelDirectory.at(directory)))
    assert len(kept) == 3 and modules.keys() == means.keys()
    with TensorWriter(tmp_path, 0) as writer:
        converter = Converter(
            {}, check_method(layout["settings"]), layout["settings"], Width.INT8, writer
        )
        found = {name: converter.stored(name, parts) for name, parts in modules.items()}
    assert {tensor.integers for tensor in found.values()} == {
        IntegerFormat.INT4
    } and not writer.loss.errors
    infos, places = [], {}
    for name, tensor in found.items():
        place = BlobLocation(tensor.file, tensor.offset, tensor.size)
        digest = Digest(hashlib.sha256(b"".join(read_chunks(place, name, 1 << 20))).hexdigest())
        infos.append(TensorInfo(name, tensor.dtype, tensor.shape, digest, tensor.integers))
        places[digest] = place
    source = CachedTensorSource(places.__getitem__, infos)
    for name in means:
        assert torch.equal(whole(source.read(name)), means[name])


@pytest.mark.parametrize("divides", [True, False])
def test_nvfp4_is_what_its_bits_say(divides: bool) -> None:
    """Number by number: a sign, two bits of exponent, one of fraction; an FP8 scale of 16; a scale
    of all."""
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (5, 24), np.uint8)
    scales = random.integers(1, 120, (5, 3)).astype(np.float32) / 8
    together = np.array([0.0625] if divides else 0.3, np.float32)
    name = "weight_global_scale" if divides else "weight_scale_2"
    key = "weight_packed" if divides else "weight"
    matrix = packings.nvfp4("x", {key: data, "weight_scale": scales, name: together})
    assert matrix.values is None and matrix.scales.shape == (5, 48)
    for row in range(5):
        for column in range(48):
            bits = int(data[row, column // 2]) >> 4 * (column % 2) & 15
            exponent, fraction = bits >> 1 & 3, bits & 1
            number = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
            scale = (
                scales[row, column // 16] / together.item()
                if divides
                else scales[row, column // 16] * together
            )
            assert matrix.scales[row, column] == np.float32(
                (-number if bits & 8 else number) * np.float32(scale)
            )


@pytest.mark.parametrize("changed", ["weight_scale", "weight_scale_2", "weight"])
def test_parts_of_nvfp4_that_contradict_one_another_are_refused(changed: str) -> None:
    ones = np.ones((4, 2), np.float32)
    parts: dict[str, NDArray[Any]] = {"weight": np.ones((4, 16), np.uint8), "weight_scale": ones}
    parts["weight_scale_2"] = ones[0, 0].reshape(())
    assert packings.nvfp4("x", parts).scales.shape == (4, 32)
    with pytest.raises(InvalidArgumentError) as caught:
        packings.nvfp4("x", parts | {changed: np.ones((4, 3), parts[changed].dtype)})
    assert caught.value.field == "x"


def test_a_scale_of_nothing_gives_no_numbers_and_is_refused(tmp_path: Path) -> None:
    made = compressed_nvfp4(torch.ones(4, 32)).parts | {"weight_global_scale": torch.zeros(1)}
    directory = write_checkpoint(
        tmp_path / "odd", {}, {f"x.{end}": part for end, part in made.items()}
    )
    _, modules = sorted_parts(stored_tensors(ModelDirectory.at(directory)))
    with (
        TensorWriter(tmp_path, 0) as writer,
        pytest.raises(InvalidArgumentError, match="no numbers"),
    ):
        Converter({}, "compressed-tensors", {}, Width.BFLOAT16, writer).stored(
            "x.weight", modules["x.weight"]
        )
