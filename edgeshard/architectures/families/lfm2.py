"""lfm2: short convolutions between two gates in most layers, attention in the others. Of lfm2_vl
the text runs."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures import short_convolution
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, attending
from edgeshard.architectures.limits import MAX_SIZE
from edgeshard.architectures.parts import fixed_values, never_null
from edgeshard.architectures.record import Architecture, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import FULL


def _inner(fields: ConfigFields) -> int:
    """The width inside the MLP: two thirds of what config.json says, times a factor and rounded up,
    where it is to be adjusted."""
    inner = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return inner
    multiple = fields.size("block_multiple_of")
    adjusted = int(fields.number("block_ffn_dim_multiplier") * int(2 * inner / 3))
    return multiple * -(-adjusted // multiple)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    return short_convolution.mixer(fields, shape, layer) | short_convolution.mlp(
        shape, _inner(fields)
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    if not 0 < (inner := _inner(fields)) <= MAX_SIZE:
        raise fields.refuse(
            "intermediate_size", f"is adjusted to {inner}; it must be between 1 and {MAX_SIZE}"
        )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The keys of config.json: the file has the MLP's width as it is."""
    kinds = attending(fields, FULL, short_convolution.CONVOLUTION)
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


ARCHITECTURE = Architecture(
    name="lfm2",
    nested={"lfm2_vl": "lfm2"},
    current=short_convolution.current,
    defaults=short_convolution.DEFAULTS
    | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
    activations=frozenset({"silu"}),
    flags=("conv_bias", "block_auto_adjust_ff_dim"),
    sizes=("intermediate_size", "conv_L_cache", "block_multiple_of"),
    numbers=("norm_eps", "block_ffn_dim_multiplier"),
    checks=(
        short_convolution.check,
        never_null("block_ffn_dim_multiplier"),
        _check,
        fixed_values(block_use_swiglu=True, use_pos_enc=True),
    ),
    prefixes=("model.", "language_model."),
    outer_names=short_convolution.OUTER_NAMES,
    outer=short_convolution.outer,
    block=_block,
    kv=short_convolution.kv,
    states=short_convolution.states,
    library=Library("lfm2", "Lfm2"),
    runs=Plugged(mixers=short_convolution.MIXERS),
    ends=short_convolution.ends,
    gguf=Gguf(config=_gguf),
)
