"""A profile in words for an operator, and as the JSON text in which it is kept. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import weights_text
from edgeshard.domain.nodes.profile import (
    PROFILE_VERSION,
    ComputeProfile,
    Effort,
    LayerKind,
    LinkProfile,
)
from edgeshard.forms import Forms
from edgeshard.profiles.fit import LayerFit, fit_profile
from edgeshard.profiles.profile_quality import quality_warnings


def profile_lines(profile: ComputeProfile) -> Iterator[str]:
    """The lines of a profile's report. Raises InvalidArgumentError for a profile without
    samples."""
    fitted = fit_profile(profile)
    weights = weights_text(profile.dtype, profile.quantisation)
    yield (
        f"node {profile.fingerprint}, model shape {profile.model_hash}, {weights}, {profile.device}"
    )
    yield f"{profile.threads} threads" + (
        ", quick: fewer points, less exact" if profile.effort is Effort.QUICK else ""
    )
    for doubt in quality_warnings(fitted):
        yield f"doubtful: {doubt}"
    for fit in fitted.layers:
        yield from _layer(fit)
    overhead, memory = profile.overhead, profile.memory
    yield (
        f"step overhead: {time_text(overhead.seconds)}, and "
        f"{time_text(overhead.seconds_per_byte * 2**20)}/MiB"
    )
    shared = ", shared with the accelerator" if memory.unified else ""
    yield f"memory: {_size(memory.free_bytes)} free of {_size(memory.total_bytes)}{shared}"
    yield f"the agent itself: {_size(memory.daemon_bytes)}"
    if profile.effort is Effort.FIRST:
        yield "disk and power: not measured"
        return
    if profile.disk is None and profile.beside_stages:
        yield "disk: is not measured while stages run"
    elif profile.disk is None:
        yield "disk: could not be read past the page cache"
    else:
        disk, free = profile.disk, _size(profile.disk.free_bytes)
        written = (
            f", writes {disk.write_bytes_per_s / 1e9:.2f} GB/s flushed"
            if disk.write_bytes_per_s
            else ""
        )
        yield (
            f"disk: reads {disk.read_bytes_per_s / 1e9:.2f} GB/s past the page cache{written}, "
            f"{free} free"
        )
    energy = profile.energy
    if energy is None:
        yield "power: no sensor could be read"
    else:
        yield (
            f"power: {energy.idle_w:.1f} W at rest, {energy.busy_w:.1f} W while measuring "
            f"({energy.source})"
        )


def _layer(fit: LayerFit) -> Iterator[str]:
    layer = fit.profile
    name = f"{layer.kind}" + (f", window {layer.window}" if layer.window else "")
    yield f"{name}: {layer.layers} of {layer.parameters:,} parameters"
    if layer.kind is not LayerKind.HEAD:
        times = ", ".join(
            f"{s.count}: {time_text(s.seconds)}" for s in layer.prefill if s.context == 0
        )
        yield f"  prefill by tokens: {times}  (fit within {fit.prefill.error.max:.1%})"
    if layer.kind is not LayerKind.EMBEDDING:
        context = layer.decode[0].context
        times = ", ".join(
            f"{s.count}: {time_text(s.seconds)}" for s in layer.decode if s.context == context
        )
        yield (
            f"  decode by sequences, {context} positions: {times}  (fit within "
            f"{fit.decode.error.max:.1%})"
        )
    slowest = max(sample.spread for sample in (*layer.prefill, *layer.decode))
    yield f"  repeats differ by {slowest:.1%} at most (median deviation)"


def time_text(seconds: float) -> str:
    """Three digits or so: `1.23 s`, `4.56 ms`, `789 us`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


ProfileT = TypeVar("ProfileT", ComputeProfile, LinkProfile)

_PROFILE = Forms("profile", "measure again")


@dataclass(frozen=True, slots=True)
class _Versioned:
    version: int

    def check(self) -> None:
        if self.version != PROFILE_VERSION:
            raise InvalidArgumentError(
                f"the profile is of version {self.version}, not {PROFILE_VERSION}; measure again",
                field="version",
            )


def profile_text(profile: ComputeProfile | LinkProfile) -> str:
    """A profile and its version as JSON: a link's in one line, a node's in many."""
    plain = {"version": PROFILE_VERSION, **_PROFILE.write(type(profile), profile)}
    return json.dumps(plain, indent=1 if isinstance(profile, ComputeProfile) else None)


def parse_profile(kind: type[ProfileT], text: str) -> ProfileT:
    """The profile of a text. Raises InvalidArgumentError naming the field at fault, also for
    another version."""
    _PROFILE.from_text(_Versioned, text)
    return _PROFILE.from_text(kind, text)
