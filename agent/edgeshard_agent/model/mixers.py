"""Mixers of our own, in place of modules of transformers' decoder layers: a record's
`Plugged.mixers` names them.

They have those modules' parts under their names, so that tensors find their places and matrices
become projections of our kernels. The data that a request leaves is in the step's states instead of
a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.ops.attention import Scoring
from edgeshard_agent.ops.elementwise import gated_norm, rms_norm
from edgeshard_agent.ops.recurrent import (
    ScanHeads,
    SpanStates,
    gated_delta_rule,
    selective_scan,
    short_convolution,
)


class Llama4Attention(nn.Module):
    """Attention with a rotary embedding of neighbouring dimensions, followed by norms. In layers
    without positions, queries grow with the logarithm of their position.

    The module of transformers counts positions from the first token of a call.
    """

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
            query = _turned(query, position_embeddings[0])
            key = _turned(key, position_embeddings[0])
            if self.normed is not None:
                query, key = self.normed(query), self.normed(key)
        elif self.tuned:
            past = torch.floor((layer_positions[0].float() + 1.0) / self.floor)
            query = (query * (torch.log1p(past) * self.tuning + 1.0).view(rows, 1, 1)).to(
                query.dtype
            )
        attended = step.attend(
            self.layer_idx, query, key, value, Scoring(self.head_dim**-0.5), layer_chunk
        )
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
        """([1, T, width], nothing) from [1, T, width]; a layer of transformers takes the router's
        logits there."""
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        best, indices = torch.topk(
            nn.functional.linear(flat, self.router.weight), self.chosen, dim=1
        )
        mixed = self.experts(
            flat, indices, torch.sigmoid(best.float()).to(flat.dtype), on_inputs=True
        )
        return (self.shared_expert(flat.unsqueeze(0))[0] + mixed).view(hidden_states.shape), None


def llama4_experts(theirs: Any) -> nn.Module:
    """Ours in place of a layer's mixture; an MLP stays as it is."""
    return Llama4Experts(theirs) if hasattr(theirs, "router") else theirs


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Vectors [T, heads, D], whose neighbouring pairs are complex numbers, times `turns` [T, D /
    2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(2).to(x.dtype)


class SelectiveScan(nn.Module):
    """Mamba2's mixer, a convolution before a selective scan.

    The mixer of a layer whose states are the convolution's last inputs [slots, taps - 1, channels],
    in the model's dtype, and the matrices [slots, heads, N, P], in float32.
    """

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
        # Not the module's own: that of nemotron_h differs from the one that its model was made
        # with.
        self.step_limits: tuple[float, float] = tuple(config.time_step_limit or (0.0, math.inf))
        for name, part in theirs.named_children():
            setattr(self, name, part)
        self.A_log: nn.Parameter = theirs.A_log
        self.D: nn.Parameter = theirs.D
        self.dt_bias: nn.Parameter = theirs.dt_bias
        self.norm_groups = self.inner // getattr(
            self.norm, "group_size", self.inner // self.group_count
        )
        self.gate_first = not getattr(self.norm, "norm_before_gate", False)
        self.input_scale: float = getattr(theirs, "ssm_in_multiplier", 1.0)
        self.widths = [self.inner, self.inner, self.group_width, self.group_width, self.heads]
        """The widths of gate, x, b, c and step in a row, which `scales` multiply."""
        self.scales: list[float] = getattr(config, "ssm_multipliers", None) or [1.0] * 5

    @staticmethod
    def instead_of(theirs: Any, config: Any) -> nn.Module:
        """Ours for a module with a scan. Any other, as families have in layers of other kinds, is
        returned."""
        return SelectiveScan(theirs, config) if hasattr(theirs, "A_log") else theirs

    def forward(
        self, hidden_states: torch.Tensor, step: StepAttention, **_: object
    ) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(
        self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates
    ) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        tails, memory = states
        rows = hidden.shape[1]
        gate, inputs, step = self._projected(hidden[0])
        # Only in a layer that is timed with random numbers have these another dtype.
        heads = ScanHeads(
            self.dt_bias.float(), self.A_log.float(), self.D.float(), self.step_limits
        )
        mixed = short_convolution(
            inputs, self.conv1d.weight.squeeze(1), tails, spans, self.conv1d.bias
        )
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
        result: torch.Tensor = self.out_proj(
            gated_norm(outputs, gate, weight, eps, self.norm_groups, self.gate_first)
        )
        return result.unsqueeze(0)

    def _projected(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """The gate [T, inner], the convolution's inputs [T, channels] and the step [T, heads]."""
        projected: torch.Tensor = self.in_proj(
            hidden if self.input_scale == 1.0 else hidden * self.input_scale
        )
        for part, scale in zip(projected.split(self.widths, dim=1), self.scales, strict=True):
            if scale != 1.0:
                part.mul_(scale)
        return list(
            projected.split([self.inner, self.inner + 2 * self.group_width, self.heads], dim=1)
        )


class ShortConvolution(nn.Module):
    """The mixer of a layer whose state is the convolution's last inputs, [slots, taps - 1, width]
    in the model's dtype.

    One projection gives two gates and values: the first gate multiplies the inputs of the
    convolution, the second one its outputs.
    """

    in_proj: Any
    conv: Any
    out_proj: Any

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.layer_idx: int = theirs.layer_idx
        for name, part in theirs.named_children():
            setattr(self, name, part)

    def forward(
        self, hidden_states: torch.Tensor, step: StepAttention, **_: object
    ) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(
        self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates
    ) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        (tails,) = states
        into, outof, values = self.in_proj(hidden)[0].chunk(3, dim=1)
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        mixed = short_convolution(into * values, weight, tails, spans, bias, activated=False)
        result: torch.Tensor = self.out_proj((outof * mixed).unsqueeze(0))
        return result


class KimiDelta(nn.Module):
    """Kimi's delta attention: each channel of a key decays at a rate of its own.

    The mixer of a layer with two kinds of states. These are the convolution's last inputs
    [slots, taps - 1, 3 * heads * D], in the model's dtype, and the matrices [slots, heads, D, D],
    in float32.
    """

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

    def forward(
        self, hidden_states: torch.Tensor, step: StepAttention, **_: object
    ) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(
        self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates
    ) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        tails, memory = states
        rows, forget = hidden.shape[1], self.forget_gate
        by_head = (rows, self.heads, self.head_dim)
        inputs = torch.cat(
            [project(hidden)[0] for project in (self.q_proj, self.k_proj, self.v_proj)], dim=1
        )
        weight = self.conv1d.weight.view(inputs.shape[1], -1)
        mixed = short_convolution(inputs, weight, tails, spans)
        query, key, value = (part.reshape(by_head) for part in mixed.chunk(3, dim=1))
        # A_log and dt_bias are float32 in any dtype.
        opened = softplus(
            forget.f_b_proj(forget.f_a_proj(hidden))[0].float() + forget.dt_bias
        ).view(by_head)
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


MIXERS: Mapping[str, Callable[[Any, Any], nn.Module]] = {
    "kimi_delta": lambda theirs, config: kimi_delta(theirs),
    "llama4_attention": lambda theirs, config: Llama4Attention(theirs),
    "llama4_experts": lambda theirs, config: llama4_experts(theirs),
    "selective_scan": SelectiveScan.instead_of,
    "short_convolution": lambda theirs, config: ShortConvolution(theirs),
}
"""By kind, what makes ours of the module of transformers, which is on the meta device, and of its
configuration."""
