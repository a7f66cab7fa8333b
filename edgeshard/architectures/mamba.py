"""Shared parts of families with Mamba2 layers: the sizes, tensors, states and checks of these.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.limits import MAX_SIZE
from edgeshard.architectures.parts import even_split, linear, norms
from edgeshard.architectures.record import Shapes
from edgeshard.architectures.shape import StateSize

LINEAR = "linear_attention"
"""The type of a Mamba2 layer in transformers' configuration classes."""
FLOAT32 = r"(^|\.)(A_log|D|dt_bias)$"
SILU = frozenset({"silu", "swish"})
"""The activations of the convolution's output."""
_LIMITS = "time_step_limit"
MIXER = "selective_scan"
"""The agent's own, in place of transformers'."""


@dataclass(frozen=True, slots=True)
class MambaKeys:
    """The keys under which config.json has the sizes of Mamba2 layers, and flags for their
    biases."""

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    input_bias: str = "mamba_proj_bias"
    output_bias: str = "mamba_proj_bias"


DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""Defaults of the classes that have these keys."""


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba2 layer.

    It has heads and their width, groups of heads that share a state's inputs and outputs, the width
    of these, and the taps of its convolution. Flags tell which biases it has, and whether a norm
    follows its scan."""

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    input_bias: bool
    output_bias: bool
    normed: bool = True

    @classmethod
    def read(
        cls, fields: ConfigFields, keys: MambaKeys, head_dim: int, normed: bool = True
    ) -> Mamba:
        """Raises UnsupportedModelError for sizes that do not fit together."""
        heads = fields.size(keys.heads)
        groups = fields.size(keys.groups)
        taps = fields.size(keys.taps)
        even_split(fields, keys.heads, heads, keys.groups, groups)
        if taps < 2:
            raise fields.refuse(keys.taps, "is 1; it must be 2 or more")
        mamba = cls(
            heads,
            head_dim,
            groups,
            fields.size(keys.state),
            taps,
            fields.flag(keys.conv_bias),
            fields.flag(keys.input_bias),
            fields.flag(keys.output_bias),
            normed,
        )
        if mamba.inner + mamba.channels + heads > MAX_SIZE:
            why = (
                f"is {heads}, of {head_dim} numbers each; a layer's input may have {MAX_SIZE} "
                "numbers with its gate"
            )
            raise fields.refuse(keys.heads, why)
        return mamba

    @property
    def inner(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: all heads, with the inputs and the outputs of their
        states."""
        return self.inner + 2 * self.groups * self.state

    @property
    def states(self) -> tuple[StateSize, ...]:
        """The convolution's last inputs, and a matrix for each head."""
        matrix = StateSize((self.heads, self.state, self.head_dim), float32=True)
        return StateSize((self.taps - 1, self.channels)), matrix

    def tensors(self, hidden: int, path: str) -> Shapes:
        block: Shapes = {f"{path}.{name}": (self.heads,) for name in ("A_log", "D", "dt_bias")}
        block[f"{path}.conv1d.weight"] = (self.channels, 1, self.taps)
        if self.conv_bias:
            block[f"{path}.conv1d.bias"] = (self.channels,)
        if self.normed:
            block |= norms(self.inner, f"{path}.norm")
        inputs = linear(
            f"{path}.in_proj", self.inner + self.channels + self.heads, hidden, self.input_bias
        )
        return block | inputs | linear(f"{path}.out_proj", hidden, self.inner, self.output_bias)


def expanded_head_dim(fields: ConfigFields) -> int:
    """The width of a head by bamba's keys: `mamba_d_ssm`, or `mamba_expand` times the hidden size,
    over the heads. Raises UnsupportedModelError if `mamba_d_head` differs."""
    key, inner = "mamba_d_ssm", fields.values.get("mamba_d_ssm", fields.defaults.get("mamba_d_ssm"))
    if inner is None:
        key, inner = "mamba_expand", fields.size("mamba_expand") * fields.size("hidden_size")
    else:
        inner = fields.size(key)
    head_dim = even_split(fields, key, inner, "mamba_n_heads", fields.size("mamba_n_heads"))
    config_dim = fields.values.get("mamba_d_head")
    if config_dim not in (None, "auto", head_dim) or isinstance(config_dim, bool):
        raise fields.refuse(
            "mamba_d_head", f"is {shown(config_dim)}; by {key} and mamba_n_heads it is {head_dim}"
        )
    return head_dim


def plain(
    values: Mapping[str, Any], kinds: str = "", names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A config.json with an infinite `time_step_limit` as a number, which transformers writes as an
    object. The layer types are under the key `kinds` by today's names; `names` maps older ones to
    these."""
    config = dict(values)
    limits = config.get(_LIMITS)
    if isinstance(limits, list | tuple):
        config[_LIMITS] = [
            math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits
        ]
    if names and isinstance(listed := config.get(kinds), list):
        config[kinds] = [
            names.get(kind, kind) if isinstance(kind, str) else kind for kind in listed
        ]
    return config


def check_limits(fields: ConfigFields, layer_count: int) -> None:
    """Refuse a `time_step_limit` that is no pair of numbers in their order."""
    limits = fields.values.get(_LIMITS)
    if limits is None:
        return
    numbers = isinstance(limits, list) and all(type(limit) in (int, float) for limit in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise fields.refuse(
            _LIMITS, f"is {shown(limits)}; it must be the least and the most step, 0 or more"
        )


def check_kinds(fields: ConfigFields, key: str, kinds: frozenset[str], layer_count: int) -> None:
    """Refuse a list of layer types that is no list of `kinds`, one for each layer."""
    listed = fields.values.get(key)
    if listed is not None and (
        not isinstance(listed, list)
        or len(listed) != layer_count
        or any(not isinstance(kind, str) or kind not in kinds for kind in listed)
    ):
        why = (
            f"is {shown(listed)}; it must name one of {', '.join(sorted(kinds))} for each of the "
            f"{layer_count} layers"
        )
        raise fields.refuse(key, why)
