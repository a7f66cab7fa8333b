"""Mixers of our own, in place of modules of transformers' decoder layers: a record's `Plugged.mixers` names them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from edgeshard_agent.model.mixers.gated_delta import GatedDelta
from edgeshard_agent.model.mixers.kimi_delta import kimi_delta
from edgeshard_agent.model.mixers.llama4 import Llama4Attention, llama4_experts
from edgeshard_agent.model.mixers.short_convolution import ShortConvolution

MIXERS: Mapping[str, Callable[[Any], nn.Module]] = {
    "gated_delta": GatedDelta,
    "kimi_delta": kimi_delta,
    "llama4_attention": Llama4Attention,
    "llama4_experts": llama4_experts,
    "short_convolution": ShortConvolution,
}
"""By kind, what makes ours of the module of transformers, which is on the meta device."""
