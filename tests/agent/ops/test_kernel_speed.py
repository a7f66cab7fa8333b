"""The kernels' speed and their share of the machine's limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.ops import kernel_speed, native

from edgeshard.domain.nodes.kernels import KernelSpeed

NATIVE = pytest.mark.skipif(
    not native.native_available(), reason="the native kernels are not built"
)


@NATIVE
def test_rates_are_work_by_the_fastest_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the five turns of each product the second takes half a second, the others one.
    steps = itertools.cycle([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        value = now_s
        now_s += next(steps)
        return value

    monkeypatch.setattr(native, "read_rate_gb_per_s", lambda stream_bytes: 0.5)
    monkeypatch.setattr(native, "fma_rate_gflop_per_s", lambda: 0.5)
    threads = torch.get_num_threads()
    speed = kernel_speed.measure_kernels(clock)
    assert speed.row_gb_per_s == pytest.approx(2 * 8192 * 4096 / 0.5 * 1e-9)
    assert speed.rows_gflop_per_s == pytest.approx(2 * 64 * 1024 * 512 / 0.5 * 1e-9)
    assert (speed.name, speed.best_name) == (native.kernel_names()[0], native.best_kernel_name())
    assert speed.row_share == pytest.approx(speed.row_gb_per_s / 0.5)
    assert speed.is_slow, "the limits are far above"
    assert torch.get_num_threads() == threads


def test_torch_operators_have_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert kernel_speed.measure_kernels() == KernelSpeed()
    assert native.read_rate_gb_per_s() == native.fma_rate_gflop_per_s() == 0.0


@NATIVE
def test_the_limits_are_positive() -> None:
    assert native.read_rate_gb_per_s(8 << 20) > 0.1
    assert native.fma_rate_gflop_per_s() > 0.1


@NATIVE
def test_facts_have_the_speed_once_for_each_process() -> None:
    first = read_facts("cpu", None).kernels
    assert first is not None and first.name == native.kernel_names()[0]
    assert read_facts("cpu", None).kernels is first
    assert read_facts("cpu", None, known_bits="").kernels is None


@pytest.mark.parametrize(
    ("changes", "is_slow"),
    [
        ({}, False),
        ({"row_gb_per_s": 4.0}, True),
        ({"rows_gflop_per_s": 20.0}, True),
        ({"read_gb_per_s": 0.0, "fma_gflop_per_s": 0.0}, False),
    ],
    ids=["sound", "one row", "many rows", "not measured"],
)
def test_a_share_far_below_is_slow(changes: dict[str, float], is_slow: bool) -> None:
    rates = {
        "read_gb_per_s": 12.0,
        "fma_gflop_per_s": 90.0,
        "row_gb_per_s": 9.0,
        "rows_gflop_per_s": 60.0,
    }
    assert KernelSpeed("avx2", "avx2", "gcc 12.2.0", **(rates | changes)).is_slow == is_slow
