"""Mixers of our own, in place of modules of transformers' decoder layers: a record's `Plugged.mixers` names them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from edgeshard_agent.model.mixers.kimi_delta import kimi_delta
from edgeshard_agent.model.mixers.llama4 import Llama4Attention, llama4_experts
from edgeshard_agent.model.mixers.selective_scan import SelectiveScan
from edgeshard_agent.model.mixers.short_convolution import ShortConvolution

MIXERS: Mapping[str, Callable[[Any, Any], nn.Module]] = {
    "kimi_delta": lambda theirs, config: kimi_delta(theirs),
    "llama4_attention": lambda theirs, config: Llama4Attention(theirs),
    "llama4_experts": lambda theirs, config: llama4_experts(theirs),
    "selective_scan": SelectiveScan.instead_of,
    "short_convolution": lambda theirs, config: ShortConvolution(theirs),
}
"""By kind, what makes ours of the module of transformers, which is on the meta device, and of its configuration."""
