"""Profiles as values: their JSON form, their fingerprints, and what fits make of known
functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeshard_agent.measuring.profile_store import ProfileStore

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import attended_pairs
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    Effort,
    LayerKind,
    LayerProfile,
    LinkProfile,
    LinkSample,
    MemoryProfile,
    Sample,
    StepOverhead,
    config_hash,
    device_fingerprint,
)
from edgeshard.planning.inputs.measured import MeasuredTimes
from edgeshard.planning.inputs.problem import StepShape
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.profiles.fit import fit_layer, fit_link, fit_profile
from edgeshard.profiles.links import ENOUGH_S, SIZES, ProbeSchedule, link_profile
from edgeshard.profiles.report import parse_profile, profile_text

Times = Callable[[int, int], float]


def planted(
    prefill: Times, decode: Times, kind: LayerKind = LayerKind.BLOCK, window: int = 0
) -> LayerProfile:
    """A layer whose samples are exactly these functions, at the profiler's own points."""
    return LayerProfile(
        kind=kind,
        parameters=1000,
        layers=4,
        window=window,
        rotated_bytes=0,
        prefill=tuple(
            Sample(n, c, prefill(n, c)) for n in (1, 16, 64, 256, 512) for c in (0, 64, 512)
        ),
        decode=tuple(Sample(n, c, decode(n, c)) for n in (1, 2, 4, 8) for c in (64, 512)),
    )


def test_samples_that_fit_no_line_are_a_typed_error() -> None:
    layer = planted(lambda n, c: math.nan, lambda n, c: 1.0)
    with pytest.raises(InvalidArgumentError) as refused:
        fit_layer(layer)
    assert refused.value.field == "samples"


@pytest.fixture
def profile() -> ComputeProfile:
    layer = planted(lambda n, c: 1e-3 + n * 1e-5, lambda n, c: 1e-3 + n * 1e-4)
    outer = [
        planted(lambda n, c: n * 1e-6, lambda n, c: n * 1e-6, LayerKind.EMBEDDING),
        planted(lambda n, c: 2e-3, lambda n, c: 2e-3, LayerKind.HEAD),
    ]
    return ComputeProfile(
        fingerprint="abc",
        model_hash="def",
        dtype=DType.BFLOAT16,
        device="cpu",
        threads=1,
        layers=(outer[0], layer, outer[1]),
        overhead=StepOverhead(3e-4, 1e-9, 0.1),
        memory=MemoryProfile(8 << 30, 6 << 30, 300 << 20, False),
    )


FACTS = DeviceFacts("cpu", "Some CPU", 4, 8 << 30, 6 << 30, False, "edgeshard 1, torch 2")


def test_a_profile_survives_json(profile: ComputeProfile) -> None:
    assert parse_profile(ComputeProfile, profile_text(profile)) == profile


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("threads",), 0, "threads"),
        (("layers", 0, "prefill", 2, "seconds"), -1.0, "layers[0].prefill[2].seconds"),
        (("layers", 1, "decode", 0, "seconds"), float("nan"), "layers[1].decode[0].seconds"),
        (("memory",), [], "memory"),
        (("version",), 99, "version"),
        (("dtype",), "int3", "dtype"),
    ],
)
def test_a_damaged_profile_is_refused_by_field(
    profile: ComputeProfile, path: tuple[Any, ...], value: Any, field: str
) -> None:
    document = json.loads(profile_text(profile))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InvalidArgumentError) as caught:
        parse_profile(ComputeProfile, json.dumps(document))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the profile is not JSON: "),
        ("[]", "the profile should be an object; measure again"),
        ("{}", "version of the profile is missing; measure again"),
        ('{"version": 7}', "the profile is of version 7, not 3; measure again"),
        ('{"version": 3}', "latency_s of the profile is missing; measure again"),
        (
            '{"version": 3, "latency_s": "1"}',
            "latency_s of the profile should be a valid number; measure again",
        ),
        (
            '{"version": 3, "latency_s": true}',
            "latency_s of the profile should be a valid number; measure again",
        ),
        ('{"version": 3, "latency_s": NaN}', "latency_s of the profile is nan; measure again"),
        ('{"version": 3, "latency_s": -1}', "latency_s of the profile is -1.0; measure again"),
        (
            '{"version": 3, "latency_s": 0, "bandwidth_bps": 0}',
            "bandwidth_bps of the profile is 0.0; measure again",
        ),
    ],
)
def test_a_profile_that_cannot_be_read_says_where_and_what_to_do(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_profile(LinkProfile, text)
    assert caught.value.message.startswith(words)
    assert caught.value.message.endswith("; measure again")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "Other CPU"},
        {"cores": 8},
        {"memory_total_bytes": 1},
        {"software": "torch 3"},
        {"kind": "cuda"},
    ],
)
def test_the_fingerprint_changes_with_hardware_and_software(change: dict[str, Any]) -> None:
    known = device_fingerprint(FACTS, 1, {"vector": "AVX2"})
    assert device_fingerprint(replace(FACTS, **change), 1, {"vector": "AVX2"}) != known


def test_the_fingerprint_knows_threads_and_vector_units_but_not_what_else_runs() -> None:
    known = device_fingerprint(FACTS, 1, {"vector": "AVX2"})
    assert device_fingerprint(FACTS, 2, {"vector": "AVX2"}) != known
    assert device_fingerprint(FACTS, 1, {"vector": "AVX512"}) != known
    assert device_fingerprint(replace(FACTS, memory_budget_bytes=1), 1, {"vector": "AVX2"}) == known


def test_a_profile_written_before_there_was_quantisation_has_none(profile: ComputeProfile) -> None:
    values = json.loads(profile_text(profile))
    del values["quantisation"]
    assert parse_profile(ComputeProfile, json.dumps(values)) == profile
    packed = replace(profile, quantisation=Quantisation.INT4)
    assert parse_profile(ComputeProfile, profile_text(packed)) == packed


def test_a_kept_profile_is_found_for_the_same_node_and_model_only(
    profile: ComputeProfile, tmp_path: Path
) -> None:
    store = ProfileStore(tmp_path)
    path = store.keep(profile)
    assert path == tmp_path / "profiles" / "abc-def-bfloat16.json"
    assert store.find("abc", "def", DType.BFLOAT16) == profile
    assert store.find("xyz", "def", DType.BFLOAT16) is None
    assert store.find("abc", "xyz", DType.BFLOAT16) is None
    assert store.find("abc", "def", DType.FLOAT32) is None
    assert store.find("abc", "def", DType.BFLOAT16, Quantisation.INT8) is None
    packed = replace(profile, quantisation=Quantisation.INT8)
    other = store.keep(packed)
    assert store.find("abc", "def", DType.BFLOAT16, Quantisation.INT8) == packed
    assert store.find("abc", "def", DType.BFLOAT16) == profile, (
        "one does not take the other's place"
    )
    other.unlink()
    for kept in Effort:
        store.keep(replace(profile, effort=kept))
        found = [
            wanted
            for wanted in Effort
            if store.find("abc", "def", DType.BFLOAT16, effort=wanted) is not None
        ]
        assert found == list(Effort)[list(Effort).index(kept) :], "what took more effort will do"
    path.write_text(path.read_text()[:-20])
    assert store.find("abc", "def", DType.BFLOAT16) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_model_is_the_same_whatever_its_file_says_of_tokens(tiny_config: dict[str, Any]) -> None:
    assert config_hash(tiny_config | {"eos_token_id": 7, "torch_dtype": "float32"}) == config_hash(
        tiny_config
    )
    assert config_hash(tiny_config | {"intermediate_size": 128}) != config_hash(tiny_config)


def test_pairs_are_those_counted_one_by_one() -> None:
    for window in (0, 1, 7, 40):
        for context in (0, 3, 30):
            for tokens in (1, 5, 50):
                seen = [context + n + 1 for n in range(tokens)]
                expected = sum(min(keys, window) if window else keys for keys in seen)
                assert attended_pairs(tokens, context, window) == expected


def test_a_fit_recovers_a_planted_cost_between_and_beyond_its_samples() -> None:
    def prefill(tokens: float, context: float) -> float:
        masked = 2e-6 * tokens if context else 0.0
        return 1e-3 + 2e-5 * tokens + masked + 3e-9 * attended_pairs(tokens, context)

    def decode(batch: float, context: float) -> float:
        return 1e-3 + 1e-4 * batch + 5e-8 * batch * (context + 1)

    fit = fit_layer(planted(prefill, decode))
    assert fit.prefill.error.max < 1e-6 and fit.decode.error.max < 1e-6
    for tokens, context in ((1, 0), (40, 0), (300, 200), (512, 1000), (2048, 0), (1024, 4096)):
        assert fit.prefill_s(tokens, context) == pytest.approx(prefill(tokens, context), rel=1e-4)
    for batch, context in ((1, 100), (3, 300), (8, 4000), (16, 64)):
        assert fit.decode_s(batch, context) == pytest.approx(decode(batch, context), rel=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_the_stated_error_is_the_error_and_covers_noise(seed: int) -> None:
    chance = np.random.default_rng(seed)

    def true(batch: int, context: int) -> float:
        return 1e-3 + 2e-4 * batch + 1e-7 * batch * (context + 1)

    layer = planted(lambda n, c: 1e-3, lambda n, c: true(n, c) * (1 + chance.uniform(-0.05, 0.05)))
    fit = fit_layer(layer)
    deviations = [abs(fit.decode_s(s.count, s.context) / s.seconds - 1) for s in layer.decode]
    assert fit.decode.error.max == pytest.approx(max(deviations))
    assert fit.decode.error.median == pytest.approx(float(np.median(deviations)))
    assert fit.decode.error.max < 0.06
    for batch in (1, 2, 3, 6, 8):
        assert fit.decode_s(batch, 300) == pytest.approx(true(batch, 300), rel=0.06)


def test_more_context_never_costs_less_however_noisy() -> None:
    fit = fit_layer(planted(lambda n, c: 1e-3 * n / (1 + c), lambda n, c: 1e-3 * n / (1 + c)))
    assert fit.decode_s(4, 4000) >= fit.decode_s(4, 64) > 0
    assert fit.prefill_s(64, 4000) >= fit.prefill_s(64, 64) > 0


def test_the_planner_gets_a_measured_node(profile: ComputeProfile) -> None:
    times = MeasuredTimes.of(profile)
    assert times.block_s(BlockSpec(1000), StepShape(4, 1, 65, 65)) == pytest.approx(1.4e-3)
    assert times.block_s(BlockSpec(1000), StepShape(2, 100, 50.5, 100)) == pytest.approx(3e-3)
    assert times.embedding_s(StepShape(2, 100, 50.5, 100)) == pytest.approx(2e-4)
    assert times.head_s(StepShape(2, 100, 50.5, 100)) == pytest.approx(2e-3)
    assert times.step_s(0) == 3e-4
    with pytest.raises(InvalidArgumentError):
        times.block_s(BlockSpec(1001), StepShape(1, 1, 65, 65))


def test_a_steps_overhead_grows_with_its_hidden_states(profile: ComputeProfile) -> None:
    times = MeasuredTimes.of(replace(profile, overhead=StepOverhead(3e-4, 2e-9)))
    assert times.step_s(1e6) == pytest.approx(3e-4 + 2e-3)


def test_blocks_that_differ_in_window_only_have_times_of_their_own(profile: ComputeProfile) -> None:
    slow = replace(planted(lambda n, c: 5e-3, lambda n, c: 5e-3, window=32), layers=12)
    times = MeasuredTimes.of(replace(profile, layers=(*profile.layers, slow)))
    assert times.block_s(BlockSpec(1000), StepShape(1, 1, 65, 65)) == pytest.approx(1.1e-3)
    assert times.block_s(BlockSpec(1000, window=32), StepShape(1, 1, 65, 65)) == pytest.approx(5e-3)
    with pytest.raises(InvalidArgumentError, match="window of 64"):
        times.block_s(BlockSpec(1000, window=64), StepShape(1, 1, 65, 65))


def test_a_fit_names_what_it_lacks(profile: ComputeProfile) -> None:
    with pytest.raises(InvalidArgumentError, match="moe-block"):
        fit_profile(profile).of_kind(LayerKind.MOE_BLOCK)
    with pytest.raises(InvalidArgumentError, match="without samples"):
        fit_profile(replace(profile, layers=(replace(profile.layers[0], decode=()),)))


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("latency", "bandwidth"), [(2e-4, 1e10), (5e-3, 5e7), (0.05, 1e6)])
def test_a_link_is_recovered_in_spite_of_hiccups(
    seed: int, latency: float, bandwidth: float
) -> None:
    chance = np.random.default_rng(seed)
    samples = []
    for size in (0, 4096, 65536, 1 << 20):
        for repeat in range(7):
            seconds = (latency + 8 * size / bandwidth) * (1 + chance.uniform(-0.02, 0.02))
            samples.append(LinkSample(size, seconds * (20 if repeat == 3 else 1)))
    link = fit_link(samples)
    assert link.latency_s == pytest.approx(latency, rel=0.05)
    assert link.bandwidth_bps == pytest.approx(bandwidth, rel=0.05)
    assert link.spread < 0.02
    assert parse_profile(LinkProfile, profile_text(link)) == link


@pytest.mark.parametrize(
    "samples", [[], [LinkSample(5, 1.0)] * 9, [LinkSample(0, 0.0), LinkSample(9, 1.0)]]
)
def test_too_little_of_a_link_is_refused(samples: list[LinkSample]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        fit_link(samples)
    assert caught.value.field == "samples"


def test_a_link_without_a_slope_has_at_least_what_was_seen() -> None:
    link = fit_link([LinkSample(size, 1e-3) for size in (0, 1000, 100_000)])
    assert link.bandwidth_bps >= 8 * 100_000 / 1e-3 * 0.99


def test_a_slope_that_noise_could_make_is_none() -> None:
    """Loopback on a busy machine: every probe waited for its turn, and 4 MiB came hardly later than
    nothing."""
    times = {0: 4.000e-3, 1 << 20: 4.001e-3, 4 << 20: 4.002e-3}
    link = fit_link([LinkSample(size, seconds) for size, seconds in times.items()])
    assert link.bandwidth_bps == pytest.approx(8 * (4 << 20) / 4.002e-3)


def test_no_link_is_said_to_be_free() -> None:
    """Probes of a busy machine, held up at random: a line through them meets zero bytes below zero
    seconds."""
    taken_ms = {0: (7.4, 21.0), 4096: (8.1, 14.0), 65536: (0.12, 0.3), 1 << 20: (2.1, 8.9)}
    link = fit_link(
        [LinkSample(size, each / 1e3) for size, times in taken_ms.items() for each in times]
    )
    assert link.latency_s == 7.4e-3


def run_schedule(latency: float, bandwidth: float) -> ProbeSchedule:
    schedule = ProbeSchedule()
    while (size := schedule.next_size()) is not None:
        schedule.answered(size, 2 * latency + 8 * size / bandwidth)
    return schedule


def test_a_slow_link_carries_few_bytes_and_a_fast_one_shows_its_speed() -> None:
    slow, fast = run_schedule(0.02, 1e6), run_schedule(1e-4, 1e10)
    assert slow.sent_bytes < 512 << 10
    assert max(slow.answers) < SIZES[-1] and len(slow.answers) >= 2
    assert max(fast.answers) == SIZES[-1]
    assert fast.sent_bytes <= fast.most_bytes
    for schedule, latency, bandwidth in ((slow, 0.02, 1e6), (fast, 1e-4, 1e10)):
        link = link_profile(schedule.answers)
        assert link.latency_s == pytest.approx(latency, rel=0.02)
        assert link.bandwidth_bps == pytest.approx(bandwidth, rel=0.02)


def test_a_link_that_is_hardly_there_is_given_two_sizes_only() -> None:
    schedule = run_schedule(10 * ENOUGH_S, 1e4)
    assert sorted(schedule.answers) == list(SIZES[:2])
    assert schedule.sent_bytes <= 2 * SIZES[1]
