"""Kimi's delta attention, in place of the module of transformers' decoder layers: each channel of a key decays at a
rate of its own.

It has that module's parts under their names, so that tensors find their places and matrices become
projections of our kernels. The data that a request leaves is in the step's states instead of a
cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.ops.elementwise import rms_norm
from edgeshard_agent.ops.recurrent import SpanStates, gated_delta_rule, short_convolution


class KimiDelta(nn.Module):
    """The mixer of a layer with two kinds of states. These are the convolution's last inputs
    [slots, taps - 1, 3 * heads * D], in the model's dtype, and the matrices [slots, heads, D, D],
    in float32."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    forget_gate: Any
    b_proj: Any
    g_a_proj: Any
    g_b_proj: Any
    o_norm: Any
    o_proj: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.layer_idx: int = theirs.layer_idx
        self.heads: int = theirs.num_heads
        self.head_dim: int = theirs.head_dim
        self.eps: float = theirs.layer_norm_epsilon
        for name, part in theirs.named_children():
            setattr(self, name, part)
        channels, _, taps = theirs.conv1d.weight.shape
        self.conv1d: Any = nn.Module()
        """The convolutions of queries, keys and values, which a checkpoint has in a tensor each."""
        self.conv1d.weight = nn.Parameter(theirs.conv1d.weight.view(3, channels // 3, 1, taps))

    def forward(self, hidden_states: torch.Tensor, step: StepAttention, **_: object) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        tails, memory = states
        rows, forget = hidden.shape[1], self.forget_gate
        by_head = (rows, self.heads, self.head_dim)
        inputs = torch.cat([project(hidden)[0] for project in (self.q_proj, self.k_proj, self.v_proj)], dim=1)
        weight = self.conv1d.weight.view(inputs.shape[1], -1)
        mixed = short_convolution(inputs, weight, tails, spans)
        query, key, value = (part.reshape(by_head) for part in mixed.chunk(3, dim=1))
        # A_log and dt_bias are float32 in any dtype.
        opened = softplus(forget.f_b_proj(forget.f_a_proj(hidden))[0].float() + forget.dt_bias).view(by_head)
        log_decay = -forget.A_log.view(1, -1, 1).exp() * opened
        beta = self.b_proj(hidden)[0].sigmoid().float()
        outputs = gated_delta_rule(query, key, value, log_decay, beta, memory, spans)
        wide = outputs.view(-1, self.head_dim).float()
        normed, _ = rms_norm(wide, self.o_norm.weight.float(), self.eps)
        gated = normed * self.g_b_proj(self.g_a_proj(hidden)).view_as(wide).float().sigmoid()
        result: torch.Tensor = self.o_proj(gated.to(hidden.dtype).view(1, rows, -1))
        return result


def kimi_delta(theirs: Any) -> nn.Module:
    """Ours in place of a layer's delta attention; other attention of the family stays as it is."""
    return KimiDelta(theirs) if hasattr(theirs, "forget_gate") else theirs
