"""A llama with random weights, the same each time: what engines are compared with."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.sizes import sized
from edgeshard.architectures import expected_tensors
from edgeshard.domain.models.model import LayerRange

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": sized(1024, 128),
    "intermediate_size": sized(2816, 256),
    "num_hidden_layers": sized(24, 6),
    "num_attention_heads": sized(16, 4),
    "num_key_value_heads": sized(8, 2),
    "head_dim": 64,
    "vocab_size": sized(16_000, 512),
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
"""316 M parameters."""
_SPREAD = 0.02


class RandomWeights:
    """A model's tensors in bfloat16 by their names in a checkpoint, each drawn from its own name
    when it is read: a source for `StageWeights.load`. With `layers` they are the tensors of one
    stage."""

    def __init__(self, config: dict[str, Any] = CONFIG, layers: LayerRange | None = None) -> None:
        self._expected = {
            name if name == "lm_head.weight" else f"model.{name}": tensor
            for name, tensor in expected_tensors(config, layers).items()
        }

    def names(self) -> Collection[str]:
        return self._expected.keys()

    def read(self, name: str) -> torch.Tensor:
        values = torch.ones(self._expected[name].shape, dtype=torch.bfloat16)
        if values.dim() > 1:
            values.normal_(
                0.0, _SPREAD, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
            )
        return values


def write_checkpoint(directory: Path, config: dict[str, Any] = CONFIG) -> None:
    """The model as a Hugging Face directory with a file for each layer; does nothing if it exists
    already."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    weights, files = RandomWeights(config), dict[str, list[str]]()
    for name in weights.names():
        part = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "ends"
        files.setdefault(f"part-{part}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: weights.read(name) for name in names}, directory / file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    places = {name: file for file, names in files.items() for name in names}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
