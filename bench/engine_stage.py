"""Some layers of a random Llama in this process, decoding: how long a step takes with nothing
around it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageInputs, StageModel
from edgeshard_agent.model.weights.loader import TensorSource
from edgeshard_agent.model.weights.weights import StageWeights

from bench.random_llama import CONFIG, RandomWeights
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

BLOCK_TOKENS = 16


class DecodingStage:
    """`rows` requests with prompts of `context` tokens, some or all of which repeatedly decode
    `steps` tokens.

    Each request has room for `max_prompt` tokens, if that is more. Weights are bfloat16 without a
    `quantisation`, and random ones of `config` without a `source`.
    """

    def __init__(
        self,
        layers: LayerRange,
        rows: int,
        context: int,
        steps: int,
        *,
        max_prompt: int = 0,
        quantisation: Quantisation | None = None,
        config: dict[str, Any] = CONFIG,
        source: TensorSource | None = None,
    ) -> None:
        self._context, self._steps = context, steps
        self._config = config
        self._random = np.random.default_rng(0)
        blocks = -(-max(context + steps, max_prompt) // BLOCK_TOKENS)
        weights = StageWeights.load(
            source or RandomWeights(config, layers),
            config,
            layers,
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=quantisation,
        )
        self._model = StageModel.with_kv(
            weights, KvMemory(DType.BFLOAT16, blocks * rows, BLOCK_TOKENS)
        )
        for row in range(rows):
            grant = KvGrant(row, 0, tuple(range(row * blocks, (row + 1) * blocks)))
            span = Span(row, 0, context, sample=True, sampling=Sampling())
            self._timed(StepPlan(grants=(grant,), spans=(span,)), context)

    def decode(self, rows: int, seconds: float) -> list[float]:
        """Decode the first `rows` requests for `seconds`, all steps at least once; return the
        seconds of each step."""
        taken: list[float] = []
        give_up = time.perf_counter() + seconds
        while not taken or time.perf_counter() < give_up:
            taken += [self._step(rows, self._context + step) for step in range(self._steps)]
        return taken

    def prompt(self, tokens: int) -> float:
        """Seconds of the first request's prompt of `tokens` tokens, which replaces the request's
        former data."""
        span = Span(0, 0, tokens, sample=True, sampling=Sampling())
        return self._timed(StepPlan(spans=(span,)), tokens)

    def _step(self, rows: int, position: int) -> float:
        # The first step cuts off the tokens that an earlier turn decoded.
        sampling = Sampling() if position == self._context else None
        spans = tuple(Span(row, position, 1, sample=True, sampling=sampling) for row in range(rows))
        return self._timed(StepPlan(spans=spans), rows)

    def _timed(self, plan: StepPlan, tokens: int) -> float:
        inputs = self._inputs(tokens)
        began = time.perf_counter()
        self._model.execute(plan, inputs)
        return time.perf_counter() - began

    def _inputs(self, tokens: int) -> StageInputs:
        if self._model.is_first:
            return self._random.integers(0, self._config["vocab_size"], tokens)
        return torch.from_numpy(
            self._random.standard_normal((tokens, self._config["hidden_size"]), np.float32)
        ).bfloat16()
