"""Steps of a draft: a few rows of one request at a time through a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import DRAFT_TOKENS, Span, StepPlan
from edgeshard_agent.model.fused import FusedModules
from edgeshard_agent.model.stage import StageModel


class DraftSteps:
    """`places` for requests, each with an equal part of the KV pool of `model`.

    Of a step of a small model most is what a stage does around its layers: for whom, where and whether at all. Nobody
    else has these requests, so where the blocks run in native calls, nothing of that is done.
    """

    def __init__(self, model: StageModel, places: int) -> None:
        self._model = model
        pool, self._modules = model.pool, model.weights.modules
        count = pool.blocks // places
        self._tables = [np.arange(place * count, (place + 1) * count, dtype=np.int32) for place in range(places)]
        self.longest = min(count * pool.block_tokens, model.shape.max_context)
        """Positions of a request that it can read."""
        self.vocab_size = model.shape.vocab_size
        self._rows = None
        if isinstance(self._modules, FusedModules):
            with torch.inference_mode():
                self._rows = self._modules.native_rows(pool, self.longest, DRAFT_TOKENS)

    def begin(self, place: int) -> None:
        """Give the place to another request: its memory becomes zeros."""
        pool = self._model.pool
        pool.free(place)
        pool.grant(place, 0, self._tables[place].tolist())

    @torch.inference_mode()
    def logits(self, place: int, first: int, tokens: Sequence[int]) -> torch.Tensor:
        """[1, vocab] behind the last of at most `DRAFT_TOKENS` tokens, at positions from `first` on; those before were
        read, and what was read behind is forgotten."""
        if self._rows is None:
            # Whoever gives parameters may cut what was certain.
            span = Span(place, first, len(tokens), sampling=Sampling())
            return self._model.logits(StepPlan(spans=(span,)), np.array(tokens, dtype=np.int64))[-1:]
        ids = torch.tensor([tokens])
        return self._modules.head(self._rows.run(self._modules.embed(ids, ids)[0], self._tables[place], first))

    def release(self) -> None:
        """Give the memory back. It can run no step any more."""
        self._rows = None
        del self._modules
        self._model.release()
