"""gpt2: learned positions, LayerNorm, transposed weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from edgeshard_agent.model.modules import StageContext
from edgeshard_agent.model.plugged import LayerModules


class Gpt2Modules(LayerModules):
    """Blocks in `h`; embeddings and norm as GPT-2 has them."""

    token_embedding = "wte.weight"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        shape, config = context.shape, context.config
        self.h = self._blocks()
        self._ordered = list(self.h.values())
        if context.is_first:
            self.wte = self._weight(shape.vocab_size, shape.hidden_size)
            self.wpe = self._weight(shape.max_context, shape.hidden_size)
        if context.is_last:
            self.ln_f = nn.LayerNorm(
                shape.hidden_size, eps=config.layer_norm_epsilon, device="meta"
            )
            self.lm_head = self._weight(shape.vocab_size, shape.hidden_size)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.wte.weight) + functional.embedding(
            positions, self.wpe.weight
        )

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.ln_f(hidden))
        return logits


MODULES = Gpt2Modules
