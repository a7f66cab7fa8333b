"""Some layers of a random Llama in this process, decoding: how long a step takes with nothing around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageInputs, StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench.random_llama import CONFIG, RandomWeights
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

BLOCK_TOKENS = 16


class DecodingStage:
    """`rows` requests with prompts of `context` tokens, some or all of which decode `steps` tokens over and over.

    `clock` says in seconds how long a step took.
    """

    def __init__(
        self,
        layers: LayerRange,
        quantisation: Quantisation | None,
        rows: int,
        context: int,
        steps: int,
        config: dict[str, Any] = CONFIG,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._context, self._steps = context, steps
        self._vocabulary, self._width = config["vocab_size"], config["hidden_size"]
        self._random = np.random.default_rng(0)
        self._blocks = blocks = -(-(context + steps) // BLOCK_TOKENS)
        self.model = StageModel.with_kv(
            StageWeights.load(
                RandomWeights(config=config, layers=layers),
                config,
                layers,
                dtype=DType.BFLOAT16,
                device="cpu",
                quantisation=quantisation,
            ),
            KvMemory(DType.BFLOAT16, blocks * rows, BLOCK_TOKENS),
        )
        for row in range(rows):
            self._prefill(row)

    def prompt_s(self) -> float:
        """How long the first request's prompt takes when it comes again."""
        self.model.execute(StepPlan(frees=(0,)), self._inputs(0))
        return self._prefill(0)

    def decode(self, rows: int, seconds: float) -> list[float]:
        """Decode the first `rows` requests for so long, all steps at least once; seconds of each step."""
        taken: list[float] = []
        give_up = time.perf_counter() + seconds
        while not taken or time.perf_counter() < give_up:
            taken += [self._step(rows, self._context + step) for step in range(self._steps)]
        return taken

    def _prefill(self, row: int) -> float:
        grant = KvGrant(row, 0, tuple(range(row * self._blocks, (row + 1) * self._blocks)))
        span = Span(row, 0, self._context, sample=True, sampling=Sampling())
        return self._timed(StepPlan(grants=(grant,), spans=(span,)), self._inputs(self._context))

    def _step(self, rows: int, position: int) -> float:
        # The first step cuts off what an earlier turn has decoded.
        sampling = Sampling() if position == self._context else None
        spans = tuple(Span(row, position, 1, sample=True, sampling=sampling) for row in range(rows))
        return self._timed(StepPlan(spans=spans), self._inputs(rows))

    def _timed(self, plan: StepPlan, inputs: StageInputs) -> float:
        began = self._clock()
        self.model.execute(plan, inputs)
        return self._clock() - began

    def _inputs(self, tokens: int) -> StageInputs:
        if self.model.is_first:
            return self._random.integers(0, self._vocabulary, tokens)
        return torch.from_numpy(self._random.standard_normal((tokens, self._width), np.float32)).bfloat16()
