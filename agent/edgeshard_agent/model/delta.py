"""Linear attention by the gated delta rule, as a part of our own blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from edgeshard.architectures import StateSize
from edgeshard_agent.model.projection import Forms, Piece, Projection, projection
from edgeshard_agent.ops.elementwise import gated_head_norm
from edgeshard_agent.ops.recurrent import (
    SpanStates,
    delta_gates,
    gated_delta_rule,
    short_convolution,
)


class _Weight(nn.Module):
    """A parameter of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class DeltaMixer(nn.Module):
    """The mixer of a layer with two kinds of states. These are the convolution's last inputs
    [slots, taps - 1, channels], in the model's dtype, and the matrices [slots, value heads, Dk,
    Dv], in float32.

    Its inputs are q | k | v | z in one product, whatever their order in the checkpoint. All heads'
    queries are followed by all keys, all values, and all gates of the output. The inputs that open
    and decay the state are in another product, whose matrix stays whole.

    Each key head serves several value heads, which follow one another. If `tiled`, value head v has
    key head v % `key_heads` instead. The columns of the output's matrix cannot change places, so
    queries and keys are repeated.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        hidden: int,
        eps: float,
        states: Sequence[StateSize],
        forms: Forms,
        tiled: bool = False,
    ) -> None:
        super().__init__()
        self.value_heads, self.key_dim, self.value_dim = states[1].shape
        channels, _, taps = shapes["linear_attn.conv1d.weight"]
        self.values = self.value_heads * self.value_dim
        self.keys = (channels - self.values) // 2
        self.key_heads = self.keys // self.key_dim
        joined = forms.get("linear_attn.in_proj_qkvz.weight")
        inputs = [
            forms.get(f"linear_attn.{part}.weight", joined) for part in ("in_proj_qkv", "in_proj_z")
        ]
        self.inputs = projection((channels, self.values), hidden, integers=inputs)
        self.gates = Projection((self.value_heads, self.value_heads), hidden)
        self.output = Projection(
            (hidden,), self.values, integers=forms.get("linear_attn.out_proj.weight")
        )
        self.conv1d = _Weight(channels, 1, taps)
        self.norm = _Weight(self.value_dim)
        self.A_log = nn.Parameter(torch.empty(self.value_heads, device="meta"), requires_grad=False)
        self.dt_bias = nn.Parameter(
            torch.empty(self.value_heads, device="meta"), requires_grad=False
        )
        self._eps = eps
        self._repeats = self.value_heads // self.key_heads if tiled else 1

    def forward(
        self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates
    ) -> torch.Tensor:
        """[T, width] from [T, width]; `states` of the layer are brought up to date."""
        tails, memory = states
        rows = len(hidden)
        keys = self.keys
        values = self.values
        inputs, raw = self.inputs(hidden), self.gates(hidden)
        channels = inputs[:, : 2 * keys + values]
        mixed = short_convolution(channels, self.conv1d.weight.squeeze(1), tails, spans)
        opening, decaying = raw.chunk(2, dim=1)
        log_decay, beta = delta_gates(opening, decaying, self.A_log, self.dt_bias)
        query = mixed[:, :keys].view(rows, self.key_heads, self.key_dim)
        key = mixed[:, keys : 2 * keys].view(rows, self.key_heads, self.key_dim)
        if self._repeats > 1:
            query = query.repeat(1, self._repeats, 1)
            key = key.repeat(1, self._repeats, 1)
        outputs = gated_delta_rule(
            query,
            key,
            mixed[:, 2 * keys :].view(rows, self.value_heads, self.value_dim),
            log_decay,
            beta,
            memory,
            spans,
        )
        gated = gated_head_norm(
            outputs, inputs[:, 2 * keys + values :], self.norm.weight, self._eps
        )
        result: torch.Tensor = self.output(gated.view(rows, values))
        return result

    def pieces_of(self, name: str) -> list[Piece]:
        """The places of the tensor `linear_attn.PART` in projections; empty for a parameter of its
        own."""
        joined = 2 * self.keys + self.values
        whole = {
            "in_proj_qkv": ("inputs", 0),
            "in_proj_z": ("inputs", joined),
            "in_proj_b": ("gates", 0),
            "in_proj_a": ("gates", self.value_heads),
            "out_proj": ("output", 0),
        }
        part = name.removeprefix("linear_attn.")
        if part in whole:
            return [Piece(*whole[part])]
        group = self.value_heads // self.key_heads
        values = group * self.value_dim
        if part == "in_proj_qkvz":
            widths = {
                0: self.key_dim,
                self.keys: self.key_dim,
                2 * self.keys: values,
                joined: values,
            }
            return list(self._by_key_head("inputs", widths))
        if part == "in_proj_ba":
            return list(self._by_key_head("gates", {0: group, self.value_heads: group}))
        return []

    def _by_key_head(self, path: str, widths: Mapping[int, int]) -> Iterator[Piece]:
        """Pieces of a tensor that has parts of these widths for each key head; the keys of `widths`
        are the begins of all heads' parts.
        """
        row = 0
        for head in range(self.key_heads):
            for first_row, width in widths.items():
                yield Piece(path, first_row + head * width, row, row + width)
                row += width
