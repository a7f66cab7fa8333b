"""Steps of a draft: a few rows of one request at a time through a whole model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import DRAFT_TOKENS, Span, StepPlan
from edgeshard_agent.model.fused import FusedModules
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.ops.fused_blocks import BlockTable, NativeRows
from edgeshard_agent.ops.sampling import RequestSampler, sample_rows

MOST_EMBEDDED_BYTES = 8 << 20
"""Limit of an embedding that is stored once more, row by row."""


class DraftSteps:
    """`places` for requests, each with an equal part of the KV pool of `model`.

    Most of a small model's step is the stage's work around its layers: checking requests, places
    and permissions. Only the draft uses these requests, so if the blocks run in native calls, none
    of that is done.
    """

    def __init__(self, model: StageModel, places: int) -> None:
        self._model = model
        pool, self._modules = model.pool, model.weights.modules
        count = pool.blocks // places
        self._blocks = [range(place * count, (place + 1) * count) for place in range(places)]
        self._tables = [BlockTable(blocks) for blocks in self._blocks]
        self.longest = min(count * pool.block_tokens, model.shape.max_context)
        """Positions of a request that it can read."""
        self.vocab_size = model.shape.vocab_size
        self._rows: NativeRows | None = None
        self._embedded: torch.Tensor | None = None
        """All rows of a small embedding, as they are embedded: a token's is found at once."""
        if isinstance(self._modules, FusedModules):
            with torch.inference_mode():
                self._rows = self._modules.native_rows(pool, self.longest, DRAFT_TOKENS)
                width = model.shape.hidden_size
                itemsize = model.weights.modules.context.torch_dtype.itemsize
                if self.vocab_size * width * itemsize <= MOST_EMBEDDED_BYTES:
                    self._embedded = self._embed(range(self.vocab_size)).contiguous()

    def begin(self, place: int) -> None:
        """Give the place to another request: its memory becomes zeros."""
        pool = self._model.pool
        pool.free(place)
        pool.grant(place, 0, self._blocks[place])

    def logits(self, place: int, first: int, tokens: Sequence[int]) -> torch.Tensor:
        """[1, vocab] after the last of at most `DRAFT_TOKENS` tokens, at positions from `first` on.
        Earlier positions were read; later ones are forgotten. In inference mode."""
        if self._rows is None:
            # A caller that gives sampling parameters may cut positions that were certain.
            span = Span(place, first, len(tokens), sampling=Sampling())
            return self._model.logits(StepPlan(spans=(span,)), np.array(tokens, dtype=np.int64))[
                -1:
            ]
        return self._modules.head(self._rows.run(self._embed(tokens), self._tables[place], first))

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, width]"""
        if self._embedded is not None:
            return (
                self._embedded[tokens[0] : tokens[0] + 1]
                if len(tokens) == 1
                else self._embedded[list(tokens)]
            )
        ids = torch.tensor([tokens])
        return self._modules.embed(ids, ids)[0]

    def sampler(
        self, sampling: Sampling, tokens: Sequence[int], prompt_count: int
    ) -> RequestSampler:
        """Draws as the model will for a request with these tokens, whose first `prompt_count` are
        its prompt. Penalties count them and the tokens that are added later; biases of tokens that
        the draft does not know are left out."""
        biases = tuple(bias for bias in sampling.logit_bias if bias[0] < self.vocab_size)
        own = replace(sampling, logprobs=True, top_logprobs=0, logit_bias=biases)
        return RequestSampler(own, tokens, self.vocab_size, tokens[prompt_count:])

    @staticmethod
    def draw(logits: torch.Tensor, sampler: RequestSampler, position: int) -> tuple[int, float]:
        """The token for a position, from its logits [1, vocab], and how likely the draft finds
        it."""
        choice = sample_rows(logits, [sampler], [position])[0]
        return choice.token, math.exp(choice.logprob)

    def release(self) -> None:
        """Give the memory back. It can run no step any more."""
        self._rows = self._embedded = None
        del self._modules
        self._model.release()
