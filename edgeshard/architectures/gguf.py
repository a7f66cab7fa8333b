"""GGUF files of llama.cpp's converter: its changes to a family's checkpoint, and its metadata as
config.json. Pure.

The converter reorders rows of queries and keys, adds 1 to some norms and joins the experts of a
layer. The record of a family has a `Gguf` if EdgeShard undoes all the changes of that family.
`gguf_names` has the names in both forms.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.limits import MAX_LAYERS
from edgeshard.architectures.windows import FULL, SLIDING
from edgeshard.domain.errors import InvalidArgumentError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisor of each rotary frequency; it is no weight."""
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
_LOW, _HIGH = 1.0, (4.0, 1.0)
"""Options of llama3's rule in published models: the high one of llama 3.1 and after it, then of
llama 4."""
_TRAINED = (8192, *(1 << power for power in range(4, 18)))
"""Contexts of the first training; published models have the first."""


@dataclass(frozen=True, slots=True)
class GgufFields:
    """The metadata of a file, typed; its architecture's keys are named without the prefix. `file`
    is for messages."""

    file: str
    metadata: Mapping[str, Any]
    tensors: frozenset[str] = frozenset()
    rope_factors: Sequence[float] = ()
    long_factors: Sequence[float] = ()
    short_factors: Sequence[float] = ()

    @property
    def layers(self) -> int:
        """The number of blocks that predict the next token; blocks for further tokens follow
        them."""
        further = self.get("nextn_predict_layers")
        count = self.size("block_count")
        if count > MAX_LAYERS:
            raise self._refuse("block_count", f"is {count}; EdgeShard runs at most {MAX_LAYERS}")
        return count - further if type(further) is int and 0 < further < count else count

    def has(self, stem: str) -> bool:
        """Whether any block has a tensor of this name, which is without `blk.N.`."""
        return any(
            name.startswith("blk.") and name.split(".", 2)[2] == stem for name in self.tensors
        )

    def layers_with(self, stem: str) -> list[bool]:
        """Whether each block has a tensor of this name."""
        return [f"blk.{layer}.{stem}" in self.tensors for layer in range(self.layers)]

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list):  # by layer: 0 for those without
            distinct = (
                {item for item in value if item != 0}
                if all(type(item) is int for item in value)
                else set()
            )
            value = distinct.pop() if len(distinct) == 1 else None
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._refuse(key, "is missing or not one positive integer for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, float | int)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise self._refuse(key, "is missing or no positive number")
        # A float32 of the file, as the shortest decimal that means the same.
        shorter = (float(f"{value:.{digits}g}") for digits in range(1, 17))
        return next((short for short in shorter if _float32(short) == value), float(value))

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.file}: {what}; add the checkpoint as safetensors",
            field=key,
            reason="UNSUPPORTED_GGUF",
        )

    def _refuse(self, key: str, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.file}: {key} {what}", field=key, reason="MALFORMED_CHECKPOINT"
        )


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
        entry["original_max_position_embeddings"] = fields.size(
            "rope.scaling.original_context_length"
        )
        for key in ("beta_fast", "beta_slow"):
            if fields.get(f"rope.scaling.yarn_{key}") is not None:
                entry[key] = fields.number(f"rope.scaling.yarn_{key}")
    else:
        raise fields.unsupported(
            "rope.scaling.type", f"rope.scaling.type {str(kind)[:40]!r} is not supported"
        )
    if fields.rope_factors:
        entry |= _llama3(fields, theta)
    return entry


def _llama3(fields: GgufFields, theta: float) -> dict[str, Any]:
    """The rule of llama 3.1 and later that computes the file's rotary factors. Raises
    UnsupportedModelError for none."""
    factors, dims = fields.rope_factors, len(fields.rope_factors)
    largest = max(factors) if all(0 < factor < math.inf for factor in factors) else 0.0
    candidates = sorted({float(round(largest)), round(largest, 2)} - {0.0})
    for trained, factor, high in itertools.product(_TRAINED, candidates, _HIGH):
        rule = {
            "factor": factor,
            "low_freq_factor": _LOW,
            "high_freq_factor": high,
            "original_max_position_embeddings": trained,
        }
        expected = [_llama3_factor(theta ** (index / dims), rule) for index in range(dims)]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
            return {"rope_type": "llama3", **rule}
    raise fields.unsupported(ROPE_FACTORS, "its rotary factors follow no rule that EdgeShard knows")


def _llama3_factor(step: float, rule: Mapping[str, float]) -> float:
    """The divisor of the frequency 1 / `step`, as llama.cpp's converter computes it from
    config.json."""
    rounds = rule["original_max_position_embeddings"] / (2 * math.pi * step)
    low = rule["low_freq_factor"]
    high = rule["high_freq_factor"]
    factor = rule["factor"]
    if rounds > high:
        return 1.0
    if rounds < low:
        return factor
    smooth = (rounds - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def has_experts(fields: GgufFields) -> bool:
    return fields.get("expert_count") not in (None, 0)


def ssm_head(fields: GgufFields) -> int:
    """The numbers of a head of a layer with a state."""
    return fields.size("ssm.inner_size") // fields.size("ssm.time_step_rank")


def sliding(fields: GgufFields) -> dict[str, Any]:
    """The window and the type of each layer as a config.json has them; a file without a window has
    full attention."""
    window = fields.get("attention.sliding_window")
    pattern = fields.get("attention.sliding_window_pattern")
    if window in (None, 0):
        return {"sliding_window": None}
    config: dict[str, Any] = {"sliding_window": fields.size("attention.sliding_window")}
    if isinstance(pattern, list):
        config["layer_types"] = [SLIDING if slides else FULL for slides in pattern[: fields.layers]]
    return config


def attending(fields: GgufFields, attention: str, other: str) -> list[str]:
    """The type of each layer: `attention` if it has queries, else `other`."""
    return [attention if attends else other for attends in fields.layers_with("attn_q.weight")]


@dataclass(frozen=True, slots=True)
class Gguf:
    """The form in which llama.cpp writes a family.

    `names` are its `general.architecture`, the record's name if empty. Several families may share
    one: a file is of the first that `applies` to it. If `permuted`, rows of queries and keys are in
    llama.cpp's order. Tensors with names that match `unit_norms` are 1 more than in the checkpoint.
    If `in_turn`, a matrix that the file has in two parts takes their rows in turn, else one part
    follows the other. `config` returns keys of config.json that `gguf_names.KEYS` does not have, or
    has otherwise.
    """

    names: tuple[str, ...] = ()
    applies: Callable[[GgufFields], bool] = lambda fields: True
    permuted: bool = False
    unit_norms: str = ""
    in_turn: bool = False
    config: Callable[[GgufFields], dict[str, Any]] = lambda fields: {}
