"""A profile in words: medians, the quality of the fit, and a warning if other processes were at
work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    DiskProfile,
    Effort,
    EnergyProfile,
    LayerKind,
    LayerProfile,
    MemoryProfile,
    Sample,
    StepOverhead,
)
from edgeshard.profiles.report import profile_lines, time_text


@pytest.fixture
def profile() -> ComputeProfile:
    """A sliding-window block of 2 ms, a tenth more for each further sequence, and the head."""
    prefill = (Sample(1, 0, 2e-3, 0.01), Sample(64, 0, 8e-3, 0.01), Sample(64, 64, 9e-3, 0.07))
    decode = (Sample(1, 64, 2e-3, 0.02), Sample(4, 64, 2.6e-3, 0.02))
    head = (Sample(1, 0, 300e-6, 0.03),)
    return ComputeProfile(
        fingerprint="node",
        model_hash="shape",
        dtype=DType.BFLOAT16,
        device="cpu",
        threads=4,
        layers=(
            LayerProfile(LayerKind.BLOCK, 1_234_567, 5, 512, 0, prefill, decode),
            LayerProfile(LayerKind.HEAD, 99, 1, 0, 0, head, head),
        ),
        overhead=StepOverhead(4e-4, 1e-9),
        memory=MemoryProfile(8 << 30, 6 << 30, 300 << 20, unified=True),
    )


def test_every_sort_of_layer_has_its_medians_spread_and_fit(profile: ComputeProfile) -> None:
    lines = list(profile_lines(profile))
    assert lines[:3] == [
        "node node, model shape shape, bfloat16, cpu",
        "4 threads",
        "block, window 512: 5 of 1,234,567 parameters",
    ]
    assert lines[3].startswith("  prefill by tokens: 1: 2.00 ms, 64: 8.00 ms  (fit within ")
    assert lines[4].startswith(
        "  decode by sequences, 64 positions: 1: 2.00 ms, 4: 2.60 ms  (fit within "
    )
    assert lines[5] == "  repeats differ by 7.0% at most (median deviation)"
    assert lines[6] == "head: 1 of 99 parameters" and lines[7].startswith(
        "  decode by sequences, 0 positions: 1: 300 us"
    )
    assert lines[-5:-1] == [
        "step overhead: 400 us, and 1.05 ms/MiB",
        "memory: 6.00 GiB free of 8.00 GiB, shared with the accelerator",
        "the agent itself: 300 MiB",
        "disk: could not be read past the page cache",
    ]


def test_what_makes_a_profile_less_than_exact_is_said(profile: ComputeProfile) -> None:
    lines = list(profile_lines(replace(profile, effort=Effort.QUICK, processor_share=0.5)))
    assert lines[1] == "4 threads, quick: fewer points, less exact"
    assert lines[2] == "doubtful: busy while measured (50% of a core was left)"
    assert not any("busy" in line for line in profile_lines(replace(profile, processor_share=0.96)))


def test_power_is_told_where_the_device_tells_it(profile: ComputeProfile) -> None:
    *_, none = profile_lines(profile)
    assert none == "power: no sensor could be read"
    *_, last = profile_lines(replace(profile, energy=EnergyProfile(5.0, 14.25, "ina3221")))
    assert last == "power: 5.0 W at rest, 14.2 W while measuring (ina3221)"


def test_the_disk_is_told_where_it_could_be_read(profile: ComputeProfile) -> None:
    assert "disk: could not be read past the page cache" in list(profile_lines(profile))
    told = list(profile_lines(replace(profile, disk=DiskProfile(2.1e9, 300 << 30))))
    assert "disk: reads 2.10 GB/s past the page cache, 300.00 GiB free" in told
    told = list(profile_lines(replace(profile, disk=DiskProfile(2.1e9, 300 << 30, 0.9e9))))
    assert (
        "disk: reads 2.10 GB/s past the page cache, writes 0.90 GB/s flushed, 300.00 GiB free"
        in told
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.50 s"), (0.0123, "12.30 ms"), (45e-6, "45 us")]
)
def test_times_have_a_unit_that_fits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
