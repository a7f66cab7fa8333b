"""Measurements of a node and of its links, as values. Pure; `edgeshard.profiles` has their texts
and the fits.

Times are medians in seconds. A `spread` is the median absolute deviation over the median: with 0.02
half of the repeats were within 2 %.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from edgeshard.domain.checks import Check, at_most
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import NodeId, Text, check_short
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.device import DeviceFacts

PROFILE_VERSION = 3
"""1 was measured with ordinary pages, and with a tied head that was never quantised; the step
overhead of 2 had a block in it."""


MAX_SAMPLES = 200
"""Samples of one phase of a layer. The finest grid has 16."""
MAX_COUNTS = 32
"""Different counts among them: the time and the memory of a fit grow with their square and more."""
MAX_LAYERS = 256
"""Sorts of layers of one profile."""
MAX_PROFILE_SAMPLES = 4_000
"""Samples of one profile."""


def _figure(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """The check that a figure is finite, at least `low` or above it, and at most `high`."""

    def check(value: Any, field: str) -> Any:
        if not low <= value <= high or value == math.inf or (above and value == low):
            raise InvalidArgumentError(
                f"{field} of the profile is {value}; measure again", field=field
            )
        return value

    return check


Rows = Annotated[int, _figure(1, 2**32)]
Positions = Annotated[int, _figure(0, 2**32)]
Seconds = Annotated[float, _figure(1e-12, 1e9)]
"""Seconds of one step or layer: times beyond these have no square that a fit can compute with."""
Spread = Annotated[float, _figure(0, 1e9)]
Count = Annotated[int, _figure(0)]
Positive = Annotated[int, _figure(1)]
NotNegative = Annotated[float, _figure(0)]
AboveZero = Annotated[float, _figure(0, above=True)]


class Effort(StrEnum):
    """The effort of measuring a node's layers, the most first."""

    FULL = "full"
    QUICK = "quick"
    """Fewer points, less exact."""
    FIRST = "first"
    """While a deployment waits: the fewest points, once."""

    def reaches(self, other: Effort) -> bool:
        """Whether it is as much as the other, or more."""
        efforts = list(Effort)
        return efforts.index(self) <= efforts.index(other)


def at_least(one: Effort, other: Effort) -> Effort:
    """The greater of two efforts."""
    return one if one.reaches(other) else other


class LayerKind(StrEnum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    MOE_BLOCK = "moe-block"
    HEAD = "head"
    """Final norm, LM head and greedy sampling of one position for each sequence."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured point: `count` is the tokens of one sequence (prefill) or the sequences of one
    token (decode).

    `context` is the number of earlier positions of each sequence.
    """

    count: Rows
    context: Positions
    seconds: Seconds
    spread: Spread = 0.0
    repeats: Positive = 1


Samples = Annotated[tuple[Sample, ...], at_most(MAX_SAMPLES)]


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One sort of layer; the model has `layers` of it.

    `parameters` are one layer's. `window` is the sliding window in tokens, 0 for full attention.
    `rotated_bytes` are the weights that the measurement cycled through, so that no cache held them.
    `weight_bytes` are the bytes of one block whose matrices have formats of their own, 0 if they
    have not. Blocks of the same parameters may differ in their formats.
    """

    kind: LayerKind
    parameters: Count
    layers: Positive
    window: Count
    rotated_bytes: Count
    prefill: Samples
    decode: Samples
    weight_bytes: Count = 0

    def check(self) -> None:
        for field, samples in (("prefill", self.prefill), ("decode", self.decode)):
            counts = len({sample.count for sample in samples})
            if counts > MAX_COUNTS:
                raise InvalidArgumentError.about(
                    field, f"it has at most {MAX_COUNTS} different counts, not {counts}"
                )


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """The engine's overhead of a step of any layers: a fixed part, and a part for each byte of
    hidden states."""

    seconds: NotNegative
    seconds_per_byte: NotNegative = 0.0
    spread: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes. `daemon_bytes` is what the agent itself holds before it has a stage."""

    total_bytes: Count
    free_bytes: Count
    daemon_bytes: Count
    unified: bool


@dataclass(frozen=True, slots=True)
class EnergyProfile:
    """Watts, at rest and while measuring, from the sensor `source` ("nvml", "ina3221" or
    "rapl")."""

    idle_w: NotNegative
    busy_w: NotNegative
    source: Text

    @property
    def working_w(self) -> float:
        """While it computes: a sensor may show less then than at rest, by its noise."""
        return max(self.idle_w, self.busy_w)


@dataclass(frozen=True, slots=True)
class DiskProfile:
    """The disk of the agent's state: bytes a second read one after the other past the page cache,
    and bytes free.

    It writes `write_bytes_per_s` bytes a second, flushed; 0 if that was not measured.
    """

    read_bytes_per_s: AboveZero
    free_bytes: Count
    write_bytes_per_s: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """A node's times for one model shape and one storage of its weights: in `dtype`, or quantised
    by `quantisation`.

    Valid while the node's `fingerprint` is the same.

    `processor_share` is the part of the measuring time in which the profiler had a core to itself.
    If it is well below 1, other processes were at work and the times are too long. `others_share`
    is the processor time that others, including a hypervisor, took from the cores it computes on,
    as a part of theirs; 0 on an accelerator. `disk` is None if it could not be read without the
    page cache; the first effort measures neither disk nor power. With `beside_stages` the node held
    stages or standbys meanwhile: they occupied memory, and the measurement yielded to their steps.
    """

    fingerprint: Text
    model_hash: Text
    dtype: DType
    device: Text
    threads: Positive
    layers: Annotated[tuple[LayerProfile, ...], at_most(MAX_LAYERS)]
    overhead: StepOverhead
    memory: MemoryProfile
    effort: Effort = Effort.FULL
    processor_share: NotNegative = 1.0
    energy: EnergyProfile | None = None
    quantisation: Quantisation | None = None
    others_share: NotNegative = 0.0
    disk: DiskProfile | None = None
    beside_stages: bool = False

    def check(self) -> None:
        if not self.layers:
            raise InvalidArgumentError("layers are missing: measure again", field="layers")
        samples = sum(len(layer.prefill) + len(layer.decode) for layer in self.layers)
        if samples > MAX_PROFILE_SAMPLES:
            why = f"they have at most {MAX_PROFILE_SAMPLES} samples together, not {samples}"
            raise InvalidArgumentError.about("layers", why)

    @property
    def step_overhead_s(self) -> float:
        return self.overhead.seconds


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Bytes of payload, and seconds from the start of sending until all had arrived."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction between two nodes through the application path.

    A payload of n bytes takes `latency_s` + 8 n / `bandwidth_bps` seconds. `spread` is the median
    relative deviation of the samples from that line, `largest_bytes` the largest payload seen.
    """

    latency_s: NotNegative
    bandwidth_bps: AboveZero
    spread: NotNegative
    samples: Annotated[int, _figure(2)]
    largest_bytes: Count

    def transfer_s(self, size_bytes: float) -> float:
        return self.latency_s + 8.0 * size_bytes / self.bandwidth_bps


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The sending node's measurement of its link to another."""

    sender: Annotated[NodeId, check_short]
    receiver: Annotated[NodeId, check_short]
    profile: LinkProfile


def device_fingerprint(facts: DeviceFacts, threads: int, details: Mapping[str, str]) -> str:
    """A short hash of what a node's times depend on: hardware, software, threads, and `details`
    such as vector units.

    The memory budget is left out: it changes with what else runs.
    """
    return _short_hash(
        {
            "kind": facts.kind,
            "model": facts.model,
            "cores": facts.cores,
            "memory": facts.memory_total_bytes,
            "unified": facts.unified_memory,
            "software": facts.software,
            "threads": threads,
            "details": dict(details),
        }
    )


_NOT_IN_TIMES = frozenset(
    {"_name_or_path", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache"}
    | {"eos_token_id", "bos_token_id", "pad_token_id", "initializer_range"}
)


def config_hash(config: Mapping[str, Any]) -> str:
    """A short hash of the parts of a decoded config.json that its profile depends on."""
    relevant_config = {key: value for key, value in config.items() if key not in _NOT_IN_TIMES}
    return _short_hash(relevant_config)


def _short_hash(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
