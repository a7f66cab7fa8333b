"""Text through a whole model in one stage, to measure quality."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

CONTEXT = 512
HALF = 256
BLOCK = 16


def whole_stage(
    directory: Path,
    dtype: DType = DType.BFLOAT16,
    quantisation: Quantisation | None = None,
    kept: KvFormat | None = None,
    **changes: Any,
) -> StageModel:
    """A Hugging Face directory's model in one stage; keys and values are `kept` so, else in the
    dtype. `changes` are of config.json."""
    config = json.loads((directory / "config.json").read_text()) | changes
    layers = LayerRange(0, config["num_hidden_layers"])
    weights = StageWeights.load(
        SafetensorsDirectory(directory),
        config,
        layers,
        dtype=dtype,
        device="cpu",
        quantisation=quantisation,
    )
    return StageModel.with_kv(weights, KvMemory(kept or dtype, CONTEXT // BLOCK, BLOCK))


def scored(
    stage: StageModel, ids: list[int], overlap: int = HALF
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """(logits [tokens, vocab] in float32, the tokens that followed) of a text, piece by piece.

    Every token but those at the text's beginning sees `overlap` tokens or more.
    """
    step = CONTEXT - overlap
    for number, start in enumerate(range(0, len(ids) - 1, step)):
        begin = max(0, start - overlap)
        window = ids[begin : start + step + 1]
        grant = KvGrant(number, 0, tuple(range(CONTEXT // BLOCK)))
        span = Span(number, 0, len(window) - 1, sampling=Sampling())
        plan = StepPlan((number - 1,) if number else (), (grant,), (span,))
        logits = stage.logits(plan, np.array(window[:-1], dtype=np.int64))
        yield logits[start - begin :].float(), window[start - begin + 1 :]
    stage.execute(StepPlan(frees=tuple(stage.pool.requests)))


def nats(stage: StageModel, ids: list[int], overlap: int = HALF) -> float:
    """The negative log-likelihood of a text's tokens but the first, their sum. Without `overlap` it
    takes half the time."""
    losses = (
        torch.nn.functional.cross_entropy(logits, torch.tensor(following), reduction="sum")
        for logits, following in scored(stage, ids, overlap)
    )
    return sum(map(float, losses), 0.0)
