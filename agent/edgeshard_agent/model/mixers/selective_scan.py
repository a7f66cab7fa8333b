"""Mamba2's mixer, a convolution before a selective scan, in place of the module of transformers' decoder layers.

It has that module's parts under their names, so that tensors find their places and matrices become
projections of our kernels. The data that a request leaves is in the step's states instead of a
cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.ops.elementwise import gated_norm
from edgeshard_agent.ops.recurrent import ScanHeads, SpanStates, selective_scan, short_convolution


class SelectiveScan(nn.Module):
    """The mixer of a layer whose states are the convolution's last inputs [slots, taps - 1, channels], in the model's
    dtype, and the matrices [slots, heads, N, P], in float32."""

    in_proj: Any
    conv1d: Any
    norm: Any
    out_proj: Any

    def __init__(self, theirs: Any, config: Any) -> None:
        super().__init__()
        self.layer_idx: int = theirs.layer_idx
        self.heads: int = theirs.num_heads
        self.inner: int = theirs.intermediate_size
        self.group_count: int = theirs.n_groups
        self.group_width: int = theirs.n_groups * theirs.ssm_state_size
        # Not the module's own: that of nemotron_h differs from the one that its model was made with.
        self.step_limits: tuple[float, float] = tuple(config.time_step_limit or (0.0, math.inf))
        for name, part in theirs.named_children():
            setattr(self, name, part)
        self.A_log: nn.Parameter = theirs.A_log
        self.D: nn.Parameter = theirs.D
        self.dt_bias: nn.Parameter = theirs.dt_bias
        self.norm_groups = self.inner // getattr(self.norm, "group_size", self.inner // self.group_count)
        self.gate_first = not getattr(self.norm, "norm_before_gate", False)
        self.input_scale: float = getattr(theirs, "ssm_in_multiplier", 1.0)
        self.widths = [self.inner, self.inner, self.group_width, self.group_width, self.heads]
        """The widths of gate, x, b, c and step in a row, which `scales` multiply."""
        self.scales: list[float] = getattr(config, "ssm_multipliers", None) or [1.0] * 5

    @staticmethod
    def instead_of(theirs: Any, config: Any) -> nn.Module:
        """Ours for a module with a scan. Any other, as families have in layers of other kinds, is returned."""
        return SelectiveScan(theirs, config) if hasattr(theirs, "A_log") else theirs

    def forward(self, hidden_states: torch.Tensor, step: StepAttention, **_: object) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        tails, memory = states
        rows = hidden.shape[1]
        gate, inputs, step = self._projected(hidden[0])
        # Only in a layer that is timed with random numbers have these another dtype.
        heads = ScanHeads(self.dt_bias.float(), self.A_log.float(), self.D.float(), self.step_limits)
        mixed = short_convolution(inputs, self.conv1d.weight.squeeze(1), tails, spans, self.conv1d.bias)
        x, b, c = mixed.split([self.inner, self.group_width, self.group_width], dim=1)
        outputs = selective_scan(
            x.view(rows, self.heads, -1),
            b.view(rows, self.group_count, -1),
            c.view(rows, self.group_count, -1),
            step,
            heads,
            memory,
            spans,
        ).view(rows, self.inner)
        weight = getattr(self.norm, "weight", None)
        eps = 0.0 if weight is None else self.norm.variance_epsilon
        result: torch.Tensor = self.out_proj(gated_norm(outputs, gate, weight, eps, self.norm_groups, self.gate_first))
        return result.unsqueeze(0)

    def _projected(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The gate [T, inner], the convolution's inputs [T, channels] and the step [T, heads]."""
        projected: torch.Tensor = self.in_proj(hidden if self.input_scale == 1.0 else hidden * self.input_scale)
        for part, scale in zip(projected.split(self.widths, dim=1), self.scales, strict=True):
            if scale != 1.0:
                part.mul_(scale)
        return list(projected.split([self.inner, self.inner + 2 * self.group_width, self.heads], dim=1))
