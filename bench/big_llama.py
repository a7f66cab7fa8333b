"""A llama of 2.3 GB with random weights, written as a checkpoint, for what loads and streams weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.store.packed_units import PackedUnits
from edgeshard_agent.store.unit_sources import UnitSources
from safetensors.torch import save_file

from bench.random_llama import CONFIG
from bench.sizes import sized
from edgeshard.architectures import ExpectedTensor, expected_tensors, parse_config
from edgeshard.architectures.unit_forms import UnitForm
from edgeshard.architectures.units import tensors_of_units
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange

BIG_CONFIG: dict[str, Any] = {
    **CONFIG,
    "hidden_size": sized(2048, 256),
    "intermediate_size": sized(5632, 512),
    "num_hidden_layers": 24,
    "num_attention_heads": sized(32, 4),
    "num_key_value_heads": sized(8, 2),
    "head_dim": 64,
}
"""1.15 G parameters: 90 MB a layer in bfloat16."""
DEEP_CONFIG: dict[str, Any] = {**CONFIG, "num_hidden_layers": 96}
"""1.16 G parameters in layers of 24 MB, for nodes that can hold few of them."""
MODEL = Digest("b16" + "0" * 61)
"""Stands for the digest of its manifest."""
_SPREAD = 0.02


class DrawnWeights:
    """Its tensors, each drawn from its own name when it is read."""

    def __init__(self, config: dict[str, Any] = BIG_CONFIG) -> None:
        layers = LayerRange(0, config["num_hidden_layers"])
        self._expected = {
            name if name == "lm_head.weight" else f"model.{name}": tensor
            for name, tensor in expected_tensors(config, layers).items()
        }

    def names(self) -> Collection[str]:
        return self._expected.keys()

    def read(self, name: str) -> torch.Tensor:
        tensor: ExpectedTensor = self._expected[name]
        values = torch.ones(tensor.shape, dtype=torch.bfloat16)
        if len(tensor.shape) > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values.normal_(0.0, _SPREAD, generator=generator)
        return values


def write_checkpoint(directory: Path, config: dict[str, Any] = BIG_CONFIG) -> None:
    """As safetensors, a file for each layer; nothing where it is there already."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    weights, files = DrawnWeights(config), dict[str, list[str]]()
    for name in weights.names():
        part = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "ends"
        files.setdefault(f"part-{part}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: weights.read(name) for name in names}, directory / file)
    (directory / "config.json").write_text(json.dumps(config))
    index.write_text(json.dumps({"weight_map": {name: file for file, names in files.items() for name in names}}))


def sources_in(directory: Path, layers: LayerRange, quantisation: Quantisation | None = None) -> UnitSources:
    """Where the units of a stage in bfloat16 come from, whose packed files are in the folder packed of `directory`."""
    form = UnitForm(MODEL, DType.BFLOAT16, quantisation, parse_config(BIG_CONFIG))
    units = tensors_of_units(BIG_CONFIG, layers, quantisation)
    sources = UnitSources(PackedUnits(directory / "packed"), form, units)
    sources.choose()
    return sources
