"""Mixers of our own, in place of modules of transformers' decoder layers: a record's `Plugged.mixers` names them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from edgeshard_agent.model.mixers.gated_delta import GatedDelta
from edgeshard_agent.model.mixers.selective_scan import SelectiveScan

MIXERS: Mapping[str, Callable[[Any, Any], nn.Module]] = {
    "gated_delta": lambda theirs, config: GatedDelta(theirs),
    "selective_scan": SelectiveScan.instead_of,
}
"""By kind, what makes ours of the module of transformers, which is on the meta device, and of its configuration."""
