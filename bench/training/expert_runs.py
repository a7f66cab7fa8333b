"""Shared parts of the tools about a mixture's experts: the model in one stage, text through it, and
its routers.

The model is a Hugging Face directory such as `bench/training/train_mixture_model.py` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.experts import Choices
from edgeshard_agent.model.blocks import Block, MixtureMlp
from edgeshard_agent.model.stage import StageModel

from bench.scoring import HALF, nats, scored, whole_stage
from edgeshard.domain.models.dtypes import Quantisation


@dataclass(frozen=True)
class Mixture:
    """A whole model in one stage."""

    config: dict[str, Any]
    stage: StageModel

    @classmethod
    def load(cls, directory: Path, quantisation: Quantisation | None, **changes: Any) -> Mixture:
        """`changes` are of config.json."""
        config = json.loads((directory / "config.json").read_text()) | changes
        return cls(config, whole_stage(directory, quantisation=quantisation, **changes))

    def mixtures(self) -> list[MixtureMlp]:
        """The mixtures of the layers that have experts, in order."""
        blocks = (
            module for module in self.stage.weights.modules.modules() if isinstance(module, Block)
        )
        return [block.mlp for block in blocks if isinstance(block.mlp, MixtureMlp)]

    def nats_per_token(self, ids: list[int], overlap: int = HALF) -> float:
        """Mean negative log-likelihood of the tokens of a text."""
        return nats(self.stage, ids, overlap) / (len(ids) - 1)

    def routing(self, ids: list[int]) -> Choices:
        """[tokens, mixtures, chosen]: the routers' choices for every token of a text except its
        last."""
        per_token = int(self.config["num_experts_per_tok"])
        seen: list[torch.Tensor] = []
        handles = [
            mixture.router.register_forward_hook(
                lambda _module, _inputs, output: seen.append(output)
            )
            for mixture in self.mixtures()
        ]
        pieces = []
        for logits, _ in scored(self.stage, ids):
            chosen = torch.stack(
                [torch.softmax(s, -1, torch.float32).topk(per_token).indices for s in seen], dim=1
            )
            pieces.append(chosen[-len(logits) :].sort(-1).values.to(torch.int16).numpy())
            seen.clear()
        for handle in handles:
            handle.remove()
        return np.concatenate(pieces)


def token_ids(directory: Path, text: Path, first_bytes: int | None = None) -> list[int]:
    """A text's tokens; only of its first bytes if a number is given."""
    data = text.read_bytes()[:first_bytes].decode("utf-8", errors="ignore")
    return Tokenizer.load(directory / "tokenizer.json").encode(data)
