"""What the tools about a mixture's experts have in common: the model in one stage, text through it, and its routers.

The model is a Hugging Face directory such as `bench/training/train_mixture_model.py` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.experts.table import Choices
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.blocks import Block, MixtureMlp
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

CONTEXT, HALF, BLOCK = 512, 256, 16


@dataclass(frozen=True)
class Mixture:
    """A whole model in one stage."""

    config: dict[str, Any]
    stage: StageModel

    @classmethod
    def load(cls, directory: Path, quantisation: Quantisation | None, **changes: object) -> Mixture:
        """`changes` are of config.json."""
        config = json.loads((directory / "config.json").read_text()) | changes
        stage = StageModel.with_kv(
            StageWeights.load(
                SafetensorsDirectory(directory),
                config,
                LayerRange(0, config["num_hidden_layers"]),
                dtype=DType.BFLOAT16,
                device="cpu",
                quantisation=quantisation,
            ),
            KvMemory(DType.BFLOAT16, CONTEXT // BLOCK, BLOCK),
        )
        return cls(config, stage)

    def mixtures(self) -> list[MixtureMlp]:
        """Of the layers that have experts, in order."""
        blocks = (module for module in self.stage.weights.modules.modules() if isinstance(module, Block))
        return [block.mlp for block in blocks if isinstance(block.mlp, MixtureMlp)]

    def logits(self, ids: list[int], overlap: int = HALF) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """(logits [tokens, vocab], the tokens that followed) of a text, piece by piece.

        Every token but those at the text's beginning sees `overlap` tokens or more.
        """
        step = CONTEXT - overlap
        for number, start in enumerate(range(0, len(ids) - 1, step)):
            begin = max(0, start - overlap)
            window = ids[begin : start + step + 1]
            grant = KvGrant(number, 0, tuple(range(CONTEXT // BLOCK)))
            span = Span(number, 0, len(window) - 1, sampling=Sampling())
            plan = StepPlan((number - 1,) if number else (), (grant,), (span,))
            logits = self.stage.logits(plan, np.array(window[:-1], dtype=np.int64))
            yield logits[start - begin :].float(), window[start - begin + 1 :]

    def nats_per_token(self, ids: list[int], overlap: int = HALF) -> float:
        """Mean negative log-likelihood of the tokens of a text. Without `overlap` it takes half the time."""
        total, count = 0.0, 0
        for logits, following in self.logits(ids, overlap):
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(following), reduction="sum"))
            count += len(following)
        self.stage.execute(StepPlan(frees=tuple(self.stage.pool.requests)))
        return total / count

    def routing(self, ids: list[int]) -> Choices:
        """[tokens, mixtures, chosen]: what the routers chose for every token of a text but its last."""
        per_token = int(self.config["num_experts_per_tok"])
        seen: list[torch.Tensor] = []
        handles = [
            mixture.router.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
            for mixture in self.mixtures()
        ]
        pieces = []
        for logits, _ in self.logits(ids):
            chosen = torch.stack([torch.softmax(s, -1, torch.float32).topk(per_token).indices for s in seen], dim=1)
            pieces.append(chosen[-len(logits) :].sort(-1).values.to(torch.int16).numpy())
            seen.clear()
        for handle in handles:
            handle.remove()
        self.stage.execute(StepPlan(frees=tuple(self.stage.pool.requests)))
        return np.concatenate(pieces)


def token_ids(directory: Path, text: Path, first_bytes: int | None = None) -> list[int]:
    """A text's tokens; of its first bytes where a number is given."""
    data = text.read_bytes()[:first_bytes].decode("utf-8", errors="ignore")
    return Tokenizer.load(directory / "tokenizer.json").encode(data)
