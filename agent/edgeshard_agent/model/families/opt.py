"""opt: learned positions offset by 2; the 350m variant projects in and out and normalises after
each part."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures.families.opt import POSITION_OFFSET
from edgeshard_agent.model.modules import StageContext
from edgeshard_agent.model.plugged import LayerModules


class OptModules(LayerModules):
    """Embeddings and norm as OPT has them."""

    token_embedding = "embed_tokens.weight"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        shape, config = context.shape, context.config
        hidden, token_width = shape.hidden_size, config.word_embed_proj_dim
        self.layers = self._blocks()
        self._ordered = list(self.layers.values())
        self.project_in: nn.Module | None = None
        self.project_out: nn.Module | None = None
        self.final_layer_norm: nn.Module | None = None
        if context.is_first:
            self.embed_tokens = self._weight(shape.vocab_size, token_width)
            self.embed_positions = self._weight(shape.max_context + POSITION_OFFSET, hidden)
            if token_width != hidden:
                self.project_in = self._weight(hidden, token_width)
        if context.is_last:
            if config.do_layer_norm_before and not config._remove_final_layer_norm:
                affine = config.layer_norm_elementwise_affine
                self.final_layer_norm = nn.LayerNorm(
                    hidden, elementwise_affine=affine, device="meta"
                )
            if token_width != hidden:
                self.project_out = self._weight(token_width, hidden)
            self.lm_head = self._weight(shape.vocab_size, token_width)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = functional.embedding(tokens, self.embed_tokens.weight)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        return embedded + functional.embedding(
            positions + POSITION_OFFSET, self.embed_positions.weight
        )

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        for module in (self.final_layer_norm, self.project_out):
            if module is not None:
                hidden = module(hidden)
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


MODULES = OptModules
