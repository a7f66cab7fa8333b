"""A gated short convolution, in place of the module of transformers' decoder layers.

It has that module's parts under their names. The data that a request leaves is in the step's states
instead of a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.ops.recurrent import SpanStates, short_convolution


class ShortConvolution(nn.Module):
    """The mixer of a layer whose state is the convolution's last inputs, [slots, taps - 1, width] in the model's dtype.

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

    def forward(self, hidden_states: torch.Tensor, step: StepAttention, **_: object) -> torch.Tensor:
        """As transformers' layers call it, with the step among their keyword arguments."""
        assert step.span_states is not None
        return self.mix(hidden_states, step.states(self.layer_idx), step.span_states)

    def mix(self, hidden: torch.Tensor, states: tuple[torch.Tensor, ...], spans: SpanStates) -> torch.Tensor:
        """[1, T, width] from [1, T, width]; `states` of the layer are brought up to date."""
        (tails,) = states
        into, outof, values = self.in_proj(hidden)[0].chunk(3, dim=1)
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        mixed = short_convolution(into * values, weight, tails, spans, bias, activated=False)
        result: torch.Tensor = self.out_proj((outof * mixed).unsqueeze(0))
        return result
