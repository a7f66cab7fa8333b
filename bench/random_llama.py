"""Llamas with random weights, made anew each time from a seed: one that engines are compared with, and a tied one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from bench.sizes import sized
from edgeshard.architectures import expected_tensors
from edgeshard.domain.models.model import LayerRange

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": sized(1024, 128),
    "intermediate_size": sized(2816, 256),
    "num_hidden_layers": 24,
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
TIED_CONFIG: dict[str, Any] = {
    **CONFIG,
    "intermediate_size": sized(3072, 256),
    "num_hidden_layers": 28,
    "head_dim": 128,
    "vocab_size": sized(151_936, 1024),
    "tie_word_embeddings": True,
}
"""596 M parameters, a quarter of them in one matrix that is embedding and LM head, as small models of today have it."""
_SPREAD = 0.02


class RandomWeights:
    """A model's tensors in bfloat16, by their names in a checkpoint: a source that `StageWeights.load` reads from.

    With `layers` they are those of one stage.
    """

    def __init__(self, seed: int = 5, config: dict[str, Any] = CONFIG, layers: LayerRange | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in expected_tensors(config, layers).items():
            values = torch.ones(tensor.shape, dtype=torch.bfloat16)
            if len(tensor.shape) > 1:
                values.normal_(0.0, _SPREAD, generator=generator)
            self.tensors[name if name == "lm_head.weight" else f"model.{name}"] = values

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]
