"""Experts of a layer that a checkpoint has in one tensor: they are read one by one, as ranges of
its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeshard_agent.model.blocks import ExpertModules, GatedMlp, gating_of
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.model.weights import cached_source
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.native import native_available
from safetensors.torch import load_file, save_file

from edgeshard.architectures import check_manifest, expected_tensors, parts_of_joined
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.storage.checkpoint import (
    StoredTensor,
    blob_locations,
    build_manifest,
    experts_apart,
    open_checkpoint,
)
from edgeshard.storage.locations import BlobLocation
from tests.agent.model.families import LAYERS, VARIANTS, decoder_of, family_of, has_experts
from tests.support.imports import write_checkpoint


def config_of(variant: str) -> dict[str, Any]:
    """One that needs no nesting."""
    decoder = decoder_of(variant)
    return {**decoder.fields.values, "model_type": decoder.architecture.own_types[0]}


def joined_rows() -> list[str]:
    """A row of each family whose checkpoints may have all experts of a layer in one tensor."""
    rows: dict[str, str] = {}
    for name in filter(has_experts, VARIANTS):
        experts = decoder_of(name).architecture.experts
        if experts is not None and experts.joined:
            rows.setdefault(family_of(name), name)
    return list(rows.values())


def weights_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        name: torch.randn(tensor.shape).bfloat16()
        for name, tensor in expected_tensors(config).items()
    }


def joined(
    config: dict[str, Any], variant: str, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same tensors, with all experts of a layer in one tensor if the family's record has such a
    one."""
    experts, found = decoder_of(variant).architecture.experts, dict(tensors)
    assert experts is not None
    for layer in range(LAYERS):
        for whole in experts.joined:
            parts: list[torch.Tensor] = []
            while (first := f"layers.{layer}.{whole.parts[0].format(len(parts))}") in found:
                own = [f"layers.{layer}.{part.format(len(parts))}" for part in whole.parts]
                assert own[0] == first
                parts.append(torch.cat([found.pop(name) for name in own]))
            if parts:
                found[f"layers.{layer}.{whole.tensor}"] = torch.stack(parts)
    return found


def test_there_are_rows_to_test() -> None:
    wanted = {
        "gemma4",
        "gpt_oss",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "llama4",
        "qwen3_5_moe",
    }
    wanted |= {"qwen3_vl_moe", "step3p5"}
    assert {family_of(name) for name in joined_rows()} == wanted


@pytest.mark.parametrize("variant", joined_rows())
def test_both_layouts_are_one_model(variant: str, tmp_path: Path) -> None:
    config = config_of(variant)
    tensors = weights_of(config)
    whole = joined(config, variant, tensors)
    assert len(whole) < len(tensors)
    paths = (
        write_checkpoint(tmp_path / "apart", config, tensors),
        write_checkpoint(tmp_path / "whole", config, whole),
    )
    apart, together = (build_manifest("model", open_checkpoint(path)) for path in paths)
    assert apart.digest() == together.digest()
    assert {tensor.name for tensor in together.tensors} == expected_tensors(config).keys()


@pytest.mark.parametrize("variant", joined_rows())
@pytest.mark.parametrize("quantisation", [None, Quantisation.INT4])
def test_no_more_than_one_expert_is_read_at_once(
    variant: str, quantisation: Quantisation | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(variant)
    tensors = weights_of(config)
    directory = write_checkpoint(tmp_path / "whole", config, joined(config, variant, tensors))
    checkpoint = open_checkpoint(directory)
    manifest = build_manifest("model", checkpoint)
    sizes, read = [], cached_source._read

    def noting(file: Any, location: BlobLocation, info: Any) -> Any:
        sizes.append(location.size)
        return read(file, location, info)

    monkeypatch.setattr(cached_source, "_read", noting)
    source = CachedTensorSource(blob_locations(checkpoint, manifest).__getitem__, manifest.tensors)
    StageWeights.load(
        source,
        config,
        LayerRange(0, LAYERS),
        dtype=DType.BFLOAT16,
        device="cpu",
        quantisation=quantisation,
    )
    assert len(sizes) >= len(manifest.tensors)
    assert max(sizes) == max(tensor.stored_bytes for tensor in manifest.tensors), (
        "no tensor of a whole layer"
    )


@pytest.mark.skipif(not native_available(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    "variant", list({family_of(name): name for name in filter(has_experts, VARIANTS)}.values())
)
@pytest.mark.parametrize("quantisation", [Quantisation.INT8, Quantisation.INT4])
def test_experts_of_every_mixture_are_small_integers(
    variant: str, quantisation: Quantisation
) -> None:
    config = config_of(variant)
    tensors = weights_of(config)

    class Source:
        def names(self) -> Any:
            return tensors.keys()

        def read(self, name: str) -> torch.Tensor:
            return tensors[name]

    stage = StageWeights.load(
        Source(),
        config,
        LayerRange(0, LAYERS),
        dtype=DType.BFLOAT16,
        device="cpu",
        quantisation=quantisation,
    )
    mixtures = [part for part in stage.modules.modules() if isinstance(part, ExpertModules)]
    assert mixtures
    for experts in mixtures:
        projections = [part for part in experts.modules() if isinstance(part, Projection)]
        assert len(projections) == 2 * len(experts)
        assert {str(part.packed.scheme) for part in projections if part.packed is not None} == {
            str(quantisation.blocks)
        }


@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_computes_with_and_without_a_gate(gated: bool) -> None:
    torch.manual_seed(0)
    gate = torch.randn(6, 4)
    up = torch.randn(6, 4)
    down = torch.randn(4, 6)
    x = torch.randn(3, 4)
    mlp = GatedMlp(6, 4, gating_of("relu") if gated else torch.relu, gated=gated)
    for part, value in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
        if gated or part != "gate_proj":
            name, first_row = mlp.place(part)
            mlp.get_submodule(name).fill("weight", first_row, value, torch.float32, "cpu")  # type: ignore[operator]
    inner = torch.relu(x @ gate.t()) * (x @ up.t()) if gated else torch.relu(x @ up.t())
    assert torch.allclose(mlp(x), inner @ down.t(), atol=1e-5)


def test_a_tensor_of_other_experts_than_config_json_says_is_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_5_moe-joined")
    whole = joined(config, "qwen3_5_moe-joined", weights_of(config))
    name = "layers.1.mlp.experts.gate_up_proj"
    for wrong in (whole[name][:3], whole[name][:, :-1], whole[name][:, :, None]):
        directory = write_checkpoint(
            tmp_path / f"wrong{wrong.numel()}-{wrong.ndim}", config, whole | {name: wrong}
        )
        with pytest.raises(InvalidArgumentError) as caught:
            build_manifest("model", open_checkpoint(directory))
        assert caught.value.field.startswith(name.removesuffix("gate_up_proj"))


def test_both_layouts_at_once_are_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_5_moe-joined")
    tensors = weights_of(config)
    both = joined(config, "qwen3_5_moe-joined", tensors) | {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith("experts.0.up_proj.weight")
    }
    directory = write_checkpoint(tmp_path / "both", config, both)
    with pytest.raises(InvalidArgumentError, match="are the same part of the model") as caught:
        build_manifest("model", open_checkpoint(directory))
    assert caught.value.reason == "DUPLICATE_TENSOR"


def test_experts_of_a_boundless_number_are_not_listed(tmp_path: Path) -> None:
    config, name = config_of("qwen3_5_moe-joined"), "layers.0.mlp.experts.gate_up_proj"
    for shape in ((1 << 40, 0, 4), (), (4,)):
        assert parts_of_joined(config, name, shape) == {}
        tensor = StoredTensor(name, "BF16", shape, tmp_path, 8, 0)
        assert experts_apart(config, [tensor]) == (tensor,)


def test_a_model_that_was_added_with_whole_layers_is_to_be_added_again(tmp_path: Path) -> None:
    config = config_of("gpt_oss-yarn")
    directory = write_checkpoint(tmp_path / "m", config, weights_of(config))
    save_file(
        joined(config, "gpt_oss-yarn", load_file(directory / "model.safetensors")),
        directory / "model.safetensors",
    )
    checkpoint = open_checkpoint(directory)
    manifest = build_manifest("model", checkpoint)
    first = manifest.tensors[0]
    old = [tensor for tensor in manifest.tensors if "experts" not in tensor.name]
    whole = load_file(directory / "model.safetensors")
    old += [
        type(first)(name, DType.BFLOAT16, tuple(tensor.shape), first.sha256)
        for name, tensor in whole.items()
        if "experts" in name
    ]
    earlier = type(manifest)(
        manifest.name, manifest.architecture, json.dumps(config), tuple(old), ()
    )
    with pytest.raises(InvalidArgumentError, match="add the model again"):
        check_manifest(earlier)
