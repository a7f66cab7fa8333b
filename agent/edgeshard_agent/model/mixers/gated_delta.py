"""Linear attention by the gated delta rule, in place of the module of transformers' decoder layers.

It has that module's parts under their names, so that tensors find their places and matrices become projections of our
kernels; what a request leaves behind is in the step's states instead of a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.attention.states import SpanStates
from edgeshard_agent.ops.elementwise import rms_norm
from edgeshard_agent.ops.recurrent import gated_delta_rule, short_convolution


class GatedDelta(nn.Module):
    """The mixer of a layer whose states are the convolution's last inputs [slots, taps - 1, channels], in the model's
    dtype, and the matrices [slots, value heads, Dk, Dv], in float32."""

    in_proj_qkvz: Any
    in_proj_ba: Any
    in_proj_qkv: Any
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any
    conv1d: Any
    norm: Any
    out_proj: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.layer_idx: int = theirs.layer_idx
        self.key_heads: int = theirs.num_k_heads
        self.value_heads: int = theirs.num_v_heads
        self.key_dim: int = theirs.head_k_dim
        self.value_dim: int = theirs.head_v_dim
        self.eps: float = theirs.layer_norm_epsilon
        for name, part in theirs.named_children():
            setattr(self, name, part)
        self.A_log: nn.Parameter = theirs.A_log
        self.dt_bias: nn.Parameter = theirs.dt_bias
        self.joined = hasattr(theirs, "in_proj_qkvz")
        """Two projections have q, k, v and z, and b and a, each by key head; else there is one for each."""

    def forward(self, hidden_states: torch.Tensor, step: StepAttention, **_: object) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        tails, memory = states
        rows, key_width = hidden.shape[1], self.key_heads * self.key_dim
        inputs, gate, beta, step = self._joined(hidden[0]) if self.joined else self._apart(hidden[0])
        mixed = short_convolution(inputs, self.conv1d.weight.squeeze(1), tails, spans.slots, spans.first_rows)
        query, key, value = mixed.split([key_width, key_width, self.value_heads * self.value_dim], dim=1)
        # A_log and dt_bias are float32 in any dtype.
        log_decay = -self.A_log.exp() * softplus(step.float() + self.dt_bias)
        found = gated_delta_rule(
            query.view(rows, self.key_heads, self.key_dim),
            key.view(rows, self.key_heads, self.key_dim),
            value.view(rows, self.value_heads, self.value_dim),
            log_decay,
            beta.sigmoid().float(),
            memory,
            spans.slots,
            spans.first_rows,
        )
        normed, _ = rms_norm(found.view(-1, self.value_dim), self.norm.weight, self.eps)
        gated = normed * silu(gate.reshape(-1, self.value_dim).float())
        result: torch.Tensor = self.out_proj(gated.to(hidden.dtype).view(1, rows, -1))
        return result

    def _apart(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q | k | v [T, channels], the gate [T, ...], and b and a, [T, value heads]."""
        return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)

    def _joined(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, group = len(hidden), self.value_heads // self.key_heads
        by_head = self.in_proj_qkvz(hidden).view(rows, self.key_heads, -1)
        values = group * self.value_dim
        query, key, value, gate = by_head.split([self.key_dim, self.key_dim, values, values], dim=2)
        beta, step = self.in_proj_ba(hidden).view(rows, self.key_heads, 2 * group).split(group, dim=2)
        inputs = torch.cat([part.reshape(rows, -1) for part in (query, key, value)], dim=1)
        return inputs, gate, beta.reshape(rows, -1), step.reshape(rows, -1)
