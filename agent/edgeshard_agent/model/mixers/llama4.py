"""Attention and experts of Llama 4, in place of the modules of transformers' decoder layers.

They have those modules' parts under their names. Theirs count positions from the first token of a call, and run every
expert on every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.ops.attention import Scoring


class Llama4Attention(nn.Module):
    """Attention with a rotary embedding of neighbouring dimensions, followed by norms. In layers
    without positions, queries grow with the logarithm of their position."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.layer_idx: int = theirs.layer_idx
        self.head_dim: int = theirs.head_dim
        self.rotates = bool(theirs.use_rope)
        self.normed: Any = getattr(theirs, "qk_norm", None)
        self.tuned = bool(theirs.attn_temperature_tuning)
        self.tuning: float = theirs.attn_scale
        self.floor: int = theirs.floor_scale
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(theirs, name))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        step: StepAttention,
        layer_positions: torch.Tensor,
        layer_chunk: int = 0,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """As transformers' layers call it, with the step among their keyword arguments."""
        rows = hidden_states.shape[1]
        query, key, value = (
            project(hidden_states)[0].view(rows, -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotates:
            query, key = _turned(query, position_embeddings[0]), _turned(key, position_embeddings[0])
            if self.normed is not None:
                query, key = self.normed(query), self.normed(key)
        elif self.tuned:
            past = torch.floor((layer_positions[0].float() + 1.0) / self.floor)
            query = (query * (torch.log1p(past) * self.tuning + 1.0).view(rows, 1, 1)).to(query.dtype)
        attended = step.attend(self.layer_idx, query, key, value, Scoring(self.head_dim**-0.5), layer_chunk)
        return self.o_proj(attended.view(1, rows, -1)), None


class Llama4Experts(nn.Module):
    """A mixture: a token passes through the MLP of all tokens and, times its scores, through the
    MLPs of its experts.
    """

    router: Any
    experts: Any
    shared_expert: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.chosen: int = theirs.top_k
        for name, part in theirs.named_children():
            setattr(self, name, part)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """([1, T, width], nothing) from [1, T, width]; a layer of transformers takes the router's logits there."""
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        best, indices = torch.topk(nn.functional.linear(flat, self.router.weight), self.chosen, dim=1)
        mixed = self.experts(flat, indices, torch.sigmoid(best.float()).to(flat.dtype), on_inputs=True)
        return (self.shared_expert(flat.unsqueeze(0))[0] + mixed).view(hidden_states.shape), None


def llama4_experts(theirs: Any) -> nn.Module:
    """Ours in place of a layer's mixture; an MLP stays as it is."""
    return Llama4Experts(theirs) if hasattr(theirs, "router") else theirs


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Vectors [T, heads, D], whose neighbouring pairs are complex numbers, times `turns` [T, D / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(2).to(x.dtype)
