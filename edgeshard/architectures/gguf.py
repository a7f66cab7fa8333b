"""GGUF files of llama.cpp's converter: its changes to a family's checkpoint, and its metadata as a config.json. Pure.

The converter puts rows of queries and keys of its `llama` into another order, and adds 1 to the
norms of gemma. A family's record lists these changes; a family has a `Gguf` only if all of its
changes are undone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisor of each rotary frequency; it is no weight."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class GgufFields:
    """The metadata of a file, typed; its architecture's keys are named without the prefix. `file` is for messages."""

    file: str
    metadata: Mapping[str, Any]
    tensors: frozenset[str] = frozenset()
    rope_factors: Sequence[float] = ()

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and value == [value[0]] * len(value):
            value = value[0]  # by layer, and all alike
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._refuse(key, "is missing or not one positive integer for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._refuse(key, "is missing or no positive number")
        # A float32 of the file, as the shortest decimal that means the same.
        shorter = (float(f"{value:.{digits}g}") for digits in range(1, 17))
        return next((short for short in shorter if _float32(short) == value), float(value))

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.file}: {what}; add the checkpoint as safetensors", field=key, reason="UNSUPPORTED_GGUF"
        )

    def _refuse(self, key: str, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.file}: {key} {what}", field=key, reason="MALFORMED_CHECKPOINT")


def rope_parameters(fields: GgufFields) -> dict[str, Any]:
    """The rotary embedding in the form of a config.json: its base, and its stretching beyond the
    context of training.

    Raises UnsupportedModelError naming the key for a kind that EdgeShard does not run.
    """
    theta = fields.number("rope.freq_base", 10_000.0)
    kind = fields.get("rope.scaling.type")
    entry: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in (None, "none"):
        # Written by older converters without a type.
        factor = fields.number("rope.scale_linear", 1.0)
        if factor != 1.0:
            entry |= {"rope_type": "linear", "factor": factor}
    elif kind == "linear":
        entry |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    elif kind == "yarn":
        entry |= {"rope_type": "yarn", "factor": fields.number("rope.scaling.factor")}
        entry["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
    else:
        raise fields.unsupported("rope.scaling.type", f"rope.scaling.type {str(kind)[:40]!r} is not supported")
    if fields.rope_factors:
        entry |= _llama3(fields, theta)
    return entry


def _llama3(fields: GgufFields, theta: float) -> dict[str, Any]:
    """The rule of llama 3.1 and later that computes the file's rotary factors. Raises
    UnsupportedModelError for none."""
    factors, dims = fields.rope_factors, len(fields.rope_factors)
    largest = max(factors) if all(0 < factor < math.inf for factor in factors) else 0.0
    for factor in sorted({float(round(largest)), round(largest, 2)}):
        expected = [_llama3_factor(theta, index, 2 * dims, factor) for index in range(dims)] if factor else []
        if expected and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise fields.unsupported(ROPE_FACTORS, "its rotary factors follow no rule that EdgeShard knows")


def _llama3_factor(theta: float, index: int, dims: int, factor: float) -> float:
    """As llama.cpp's converter computes it from config.json."""
    wavelength: float = 2 * math.pi * theta ** (2 * index / dims)
    low, high, trained = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
    if wavelength < trained / high:
        return 1.0
    if wavelength > trained / low:
        return factor
    smooth = (trained / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Gguf:
    """The form in which llama.cpp writes a family; the record's name is its `general.architecture`.

    `norms` maps its names of a block's norms, all except the first, to the checkpoint's. With
    `permuted`, rows of queries and keys are in its own order. With `unit_norms`, norms are 1 more
    than in the checkpoint. `config` returns the keys of config.json other than the sizes.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: TWO_NORMS)
    permuted: bool = False
    unit_norms: bool = False
    config: Callable[[GgufFields], dict[str, Any]] = lambda fields: {"rope_parameters": rope_parameters(fields)}
