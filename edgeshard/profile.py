"""What was measured of a box and of its links, as values with a JSON form. Pure; the fits are in `profile_fit`.

Times are medians in seconds. A `spread` is the median absolute deviation over the median: 0.02 says that half of the
repeats were within 2 %.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from edgeshard.device import DeviceFacts
from edgeshard.dtypes import DType, Quantisation
from edgeshard.errors import InvalidArgumentError
from edgeshard.ids import NodeId

PROFILE_VERSION = 1


class LayerKind(StrEnum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    MOE_BLOCK = "moe-block"
    HEAD = "head"
    """Final norm, LM head and greedy sampling of one position for each sequence."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured point: `count` is the tokens of one sequence (prefill) or the sequences of one token (decode).

    `context` is how many positions each sequence has behind it already.
    """

    count: int
    context: int
    seconds: float
    spread: float = 0.0
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One distinct sort of layer, of which the model has `layers`.

    `parameters` are those of one layer. `window` is the sliding window in tokens, 0 for full attention.
    `rotated_bytes` are the weights that were cycled through while measuring, so that none was found in a cache.
    """

    kind: LayerKind
    parameters: int
    layers: int
    window: int
    rotated_bytes: int
    prefill: tuple[Sample, ...]
    decode: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """What the engine adds to a step whatever its layers: a fixed part, and one for each byte of hidden states."""

    seconds: float
    seconds_per_byte: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes. `daemon_bytes` is what the agent itself holds before it has a stage."""

    total_bytes: int
    free_bytes: int
    daemon_bytes: int
    unified: bool


@dataclass(frozen=True, slots=True)
class EnergyProfile:
    """Watts, at rest and while measuring, from the sensor `source` ("nvml", "ina3221" or "rapl")."""

    idle_w: float
    busy_w: float
    source: str


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """A box's times for one model shape and one way to keep its weights: in `dtype`, or as `quantisation` says.

    Valid as long as the box's `fingerprint` is the same.

    `processor_share` is the part of the measuring time in which the profiler had a core to itself; well below 1, others
    were at work and the times are too long.
    """

    fingerprint: str
    model_hash: str
    dtype: DType
    device: str
    threads: int
    layers: tuple[LayerProfile, ...]
    overhead: StepOverhead
    memory: MemoryProfile
    quick: bool = False
    processor_share: float = 1.0
    energy: EnergyProfile | None = None
    quantisation: Quantisation | None = None

    @property
    def step_overhead_s(self) -> float:
        return self.overhead.seconds

    def to_json(self) -> str:
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ComputeProfile:
        """Raises InvalidArgumentError naming the field at fault."""
        reader = _document(text)
        return cls(
            fingerprint=reader.text("fingerprint"),
            model_hash=reader.text("model_hash"),
            dtype=DType.parse(reader.text("dtype")),
            device=reader.text("device"),
            threads=reader.whole("threads", least=1),
            layers=tuple(_layer(item) for item in reader.items("layers")),
            overhead=_overhead(reader.child("overhead")),
            memory=_memory(reader.child("memory")),
            quick=reader.flag("quick"),
            processor_share=reader.number("processor_share"),
            energy=_energy(reader.child("energy")) if reader.has("energy") else None,
            quantisation=Quantisation.parse(reader.text("quantisation")) if reader.has("quantisation") else None,
        )


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Bytes of payload, and seconds from their sending until all were at the other end."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction between two boxes through the application path.

    A payload of n bytes takes `latency_s` + 8 n / `bandwidth_bps` seconds. `spread` is the median relative deviation of
    the samples from that line, `largest_bytes` the largest payload seen.
    """

    latency_s: float
    bandwidth_bps: float
    spread: float
    samples: int
    largest_bytes: int

    def transfer_s(self, size_bytes: float) -> float:
        return self.latency_s + 8.0 * size_bytes / self.bandwidth_bps

    def to_json(self) -> str:
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> LinkProfile:
        """Raises InvalidArgumentError naming the field at fault."""
        reader = _document(text)
        return cls(
            latency_s=reader.number("latency_s"),
            bandwidth_bps=reader.number("bandwidth_bps", above=True),
            spread=reader.number("spread"),
            samples=reader.whole("samples", least=2),
            largest_bytes=reader.whole("largest_bytes"),
        )


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What the sending box measured of the way to another."""

    sender: NodeId
    receiver: NodeId
    profile: LinkProfile


def device_fingerprint(facts: DeviceFacts, threads: int, details: Mapping[str, str]) -> str:
    """What a box's times depend on, as a short hash: hardware, software, threads, and `details` such as vector units.

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
    """What of a decoded config.json its profile depends on, as a short hash."""
    kept = {key: value for key, value in config.items() if key not in _NOT_IN_TIMES}
    return _short_hash(kept)


def _short_hash(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Reader:
    """The fields of a JSON object, checked as they are taken."""

    def __init__(self, values: Any, path: str) -> None:
        if not isinstance(values, dict):
            raise InvalidArgumentError(f"{path or 'the profile'} must be an object; measure again", field=path)
        self._values: dict[str, Any] = values
        self._path = path

    def text(self, key: str) -> str:
        value = self._take(key)
        return value if isinstance(value, str) else self._refuse(key, "must be text")

    def flag(self, key: str) -> bool:
        value = self._take(key)
        return value if isinstance(value, bool) else self._refuse(key, "must be true or false")

    def whole(self, key: str, least: int = 0) -> int:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(key, f"must be a whole number of at least {least}")
        return int(value)

    def number(self, key: str, above: bool = False) -> float:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(key, "must be a finite number")
        if value < 0 or (above and value == 0):
            self._refuse(key, "must be above 0" if above else "must not be negative")
        return float(value)

    def child(self, key: str) -> _Reader:
        return _Reader(self._take(key), self._name(key))

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def items(self, key: str) -> list[_Reader]:
        value = self._take(key)
        if not isinstance(value, list):
            self._refuse(key, "must be a list")
        return [_Reader(item, f"{self._name(key)}[{index}]") for index, item in enumerate(value)]

    def _take(self, key: str) -> Any:
        if key not in self._values:
            self._refuse(key, "is missing")
        return self._values[key]

    def _name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _refuse(self, key: str, why: str) -> Any:
        raise InvalidArgumentError(f"{self._name(key)} of the profile {why}; measure again", field=self._name(key))


def _document(text: str) -> _Reader:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"the profile is not JSON: {error}; measure again", field="profile") from None
    reader = _Reader(values, "")
    if reader.whole("version") != PROFILE_VERSION:
        raise InvalidArgumentError(
            f"the profile is of version {values['version']}, not {PROFILE_VERSION}; measure again", field="version"
        )
    return reader


def _layer(reader: _Reader) -> LayerProfile:
    kind = reader.text("kind")
    if kind not in set(LayerKind):
        raise InvalidArgumentError(f"kind {kind!r} of a layer is unknown; measure again", field="kind")
    return LayerProfile(
        kind=LayerKind(kind),
        parameters=reader.whole("parameters"),
        layers=reader.whole("layers", least=1),
        window=reader.whole("window"),
        rotated_bytes=reader.whole("rotated_bytes"),
        prefill=tuple(_sample(item) for item in reader.items("prefill")),
        decode=tuple(_sample(item) for item in reader.items("decode")),
    )


def _sample(reader: _Reader) -> Sample:
    return Sample(
        count=reader.whole("count", least=1),
        context=reader.whole("context"),
        seconds=reader.number("seconds", above=True),
        spread=reader.number("spread"),
        repeats=reader.whole("repeats", least=1),
    )


def _overhead(reader: _Reader) -> StepOverhead:
    return StepOverhead(reader.number("seconds"), reader.number("seconds_per_byte"), reader.number("spread"))


def _memory(reader: _Reader) -> MemoryProfile:
    return MemoryProfile(
        total_bytes=reader.whole("total_bytes"),
        free_bytes=reader.whole("free_bytes"),
        daemon_bytes=reader.whole("daemon_bytes"),
        unified=reader.flag("unified"),
    )


def _energy(reader: _Reader) -> EnergyProfile:
    return EnergyProfile(reader.number("idle_w"), reader.number("busy_w"), reader.text("source"))
