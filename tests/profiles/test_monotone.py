"""Costs that cannot fall, and profiles that report themselves as unreliable."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import attended_pairs
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    Effort,
    LayerKind,
    LayerProfile,
    MemoryProfile,
    Sample,
    StepOverhead,
)
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.step_budget import prompt_slices, stage_costs
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.measured import MeasuredTimes, doubtful
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.report.explain import explain
from edgeshard.planning.search.plan import plan
from edgeshard.planning.solvers.instance import Cut
from edgeshard.profiles.fit import fit_layer, fit_profile, non_negative
from edgeshard.profiles.grid import QUICK_GRID
from edgeshard.profiles.profile_quality import busy, quality_warnings

MODEL = model_from_config(
    "model",
    {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 16000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
ROW_S, BEHIND_S = 0.105e-3 / 12, 0.0914e-3 / 12


def profile_of(prefill: tuple[Sample, ...], decode: tuple[Sample, ...]) -> ComputeProfile:
    """A quick profile of the model with such a block, a small embedding, and a head of half a
    millisecond."""
    embedded = tuple(Sample(n, 0, 1e-6 * n) for n in (1, 4, 16, 128))
    head = tuple(Sample(n, 0, 5e-4) for n in (1, 4))
    layers = (
        LayerProfile(LayerKind.EMBEDDING, MODEL.embedding_parameters, 1, 0, 0, embedded, embedded),
        LayerProfile(LayerKind.BLOCK, MODEL.blocks[0].parameters, 24, 0, 0, prefill, decode),
        LayerProfile(LayerKind.HEAD, MODEL.head_parameters, 1, 0, 0, head, head),
    )
    memory = MemoryProfile(8 << 30, 6 << 30, 0, False)
    overhead = StepOverhead(3e-4, 1e-10)
    return ComputeProfile(
        "f", "h", DType.BFLOAT16, "cpu", 1, layers, overhead, memory, effort=Effort.QUICK
    )


@pytest.fixture
def disturbed() -> ComputeProfile:
    """Another process took half of the core whenever prompts with positions before them were
    measured."""

    def seconds(tokens: int, context: int) -> float:
        return 2e-5 + ROW_S * tokens + (BEHIND_S * tokens if context else 0.0)

    prefill = tuple(Sample(n, c, seconds(n, c)) for n, c in QUICK_GRID.prefill_points(4096))
    decode = tuple(Sample(n, c, 2e-5 + ROW_S * n + 1e-8 * n * c) for n in (1, 4) for c in (64, 256))
    return profile_of(prefill, decode)


def problem_of(profile: ComputeProfile, **changes: Any) -> PlanProblem:
    device = {"memory_bytes": 8e9, "bandwidth_bytes_per_s": 1e10, "flops": 1e11}
    link = {"bandwidth_bps": 1e9, "latency_s": 1e-4}
    cluster = parse_cluster(
        {"source": "a", "device": [{"name": name, **device} for name in "ab"], "link": [link]}
    )
    times = {name: MeasuredTimes.of(profile) for name in "ab"}
    return PlanProblem(
        MODEL, cluster, prompt_tokens=512, context_tokens=1024, times=times, **changes
    )


def test_a_prompt_of_more_tokens_does_not_take_less(disturbed: ComputeProfile) -> None:
    """These figures were 31.5 ms at 512 rows, 15.1 ms at 1,024 and 1.2 ms at 2,048: the mask was
    taken for pairs."""
    stages = stage_costs(Costs(problem_of(disturbed)), Cut((0, 1), (12, 24)))
    for stage in stages:
        assert all(less < more for less, more in pairwise(stage.prefill_s))
        # Twelve layers, linear in rows beyond the measured ones.
        at = dict(zip(stage.rows, stage.prefill_s, strict=True))
        assert at[512] == pytest.approx(12 * 512 * ROW_S, rel=0.05)
        assert at[2048] == pytest.approx(4 * at[512], rel=0.05)
        assert stage.step_s([(0, 2048)]) > stage.step_s([(0, 1024)]) > stage.step_s([(0, 512)])
        behind = stage.step_s([(512, 256)]) - stage.step_s([(0, 256)])
        assert behind == pytest.approx(12 * 256 * BEHIND_S, rel=0.01), "the mask is still paid for"
    lengths = prompt_slices(stages, 2048)
    assert sum(lengths) == 2048 and max(lengths) <= 1024, (
        "two stages work at once for most of the prompt"
    )
    best = plan(problem_of(disturbed, min_nodes=2)).prediction
    assert best is not None and best.ttft_s >= 512 * 24 * ROW_S


@pytest.mark.parametrize("seed", range(40))
def test_no_fit_falls_whatever_the_samples(seed: int) -> None:
    chance = np.random.default_rng(seed)
    wild = [chance.lognormal(sigma=2.0) for _ in range(40)]
    prefill = tuple(Sample(n, c, wild.pop()) for n in (1, 16, 64, 512) for c in (0, 64, 512))
    decode = tuple(Sample(n, c, wild.pop()) for n in (1, 2, 4, 8) for c in (64, 512))
    fit = fit_layer(
        LayerProfile(LayerKind.BLOCK, 1, 1, int(chance.choice([0, 100])), 0, prefill, decode)
    )
    rows, contexts = (1, 2, 5, 16, 17, 300, 512, 513, 4096), (0, 1, 64, 100, 512, 9000)
    for seconds in (fit.prefill_s, fit.decode_s):
        for context in contexts:
            assert all(
                less <= more * (1 + 1e-9)
                for less, more in pairwise(seconds(n, context) for n in rows)
            )
        for count in rows:
            assert all(
                less <= more * (1 + 1e-9)
                for less, more in pairwise(seconds(count, c) for c in contexts)
            )
    # Beyond the last point equally many rows cost equally much.
    assert fit.decode_s(24, 0) - fit.decode_s(16, 0) == pytest.approx(
        fit.decode_s(16, 0) - fit.decode_s(8, 0)
    )


def test_attention_alone_is_fitted_as_such() -> None:
    prefill = tuple(
        Sample(n, c, 1e-9 * attended_pairs(n, c)) for n in (1, 16, 64) for c in (0, 64, 512)
    )
    decode = tuple(Sample(n, c, 1e-8 * n * (c + 1)) for n in (1, 2, 8) for c in (64, 512))
    fit = fit_layer(LayerProfile(LayerKind.BLOCK, 1, 1, 0, 0, prefill, decode))
    assert fit.decode_s(16, 4095) == pytest.approx(1e-8 * 16 * 4096)
    assert fit.prefill_s(512, 512) == pytest.approx(1e-9 * attended_pairs(512, 512))


def test_one_sample_more_work_is_more_time_in_proportion() -> None:
    alone = (Sample(4, 64, 2e-3),)
    fit = fit_layer(LayerProfile(LayerKind.BLOCK, 1, 1, 0, 0, alone, alone))
    assert fit.decode_s(8, 64) == pytest.approx(4e-3) and fit.decode_s(2, 64) == pytest.approx(2e-3)


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_without_negatives_are_the_best_there_are(seed: int) -> None:
    chance = np.random.default_rng(seed)
    design, wanted = chance.normal(size=(8, 4)), chance.normal(size=8)
    found = non_negative(design, wanted)
    assert (found >= 0).all()

    def missed(kept: tuple[int, ...]) -> float:
        """The error of the unbounded solution on some columns, if it is allowed."""
        if not kept:
            return float(np.linalg.norm(wanted))
        tried = np.linalg.lstsq(design[:, kept], wanted, rcond=None)[0]
        return (
            float(np.linalg.norm(design[:, kept] @ tried - wanted))
            if (tried >= 0).all()
            else np.inf
        )

    least = min(missed(kept) for size in range(5) for kept in combinations(range(4), size))
    assert np.linalg.norm(design @ found - wanted) == pytest.approx(least)


# -- doubts ----------------------------------------------------------------------------------------


@pytest.fixture
def sound() -> ComputeProfile:
    def sample(count: int, context: int, pairs: float) -> Sample:
        return Sample(count, context, 1e-3 + 1e-5 * count + 1e-9 * pairs, 0.01)

    points = QUICK_GRID.prefill_points(4096)
    prefill = tuple(sample(n, c, attended_pairs(n, c)) for n, c in points)
    decode = tuple(sample(n, c, n * (c + 1)) for n, c in QUICK_GRID.decode_points(4096))
    return profile_of(prefill, decode)


def test_a_quiet_node_gives_a_sound_profile(sound: ComputeProfile) -> None:
    assert quality_warnings(fit_profile(sound)) == () == busy(sound)
    few = replace(sound, others_share=0.04, processor_share=0.96)
    assert quality_warnings(fit_profile(few)) == (), "a system's daemons take that much"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"others_share": 0.34}, "others took 34% of its cores"),
        ({"processor_share": 0.6}, "60% of a core was left"),
    ],
)
def test_what_others_took_makes_it_busy(
    sound: ComputeProfile, changes: dict[str, Any], words: str
) -> None:
    profile = replace(sound, **changes)
    assert busy(profile) == (words,)
    assert quality_warnings(fit_profile(profile)) == (f"busy while measured ({words})",)


def with_block(profile: ComputeProfile, **changes: Any) -> ComputeProfile:
    first, block, last = profile.layers
    return replace(profile, layers=(first, replace(block, **changes), last))


def test_repeats_that_differ_make_it_busy(sound: ComputeProfile) -> None:
    block = sound.layers[1]
    wide = {
        name: tuple(replace(sample, spread=0.17) for sample in getattr(block, name))
        for name in ("prefill", "decode")
    }
    assert busy(with_block(sound, **wide)) == ("repeats differ by 17%",)
    # A median tolerates a few samples that differ.
    one = (replace(block.prefill[0], spread=0.9), *block.prefill[1:])
    assert busy(with_block(sound, prefill=one)) == ()


def test_a_fit_that_misses_its_points_by_more_than_their_spread_says_so(
    sound: ComputeProfile,
) -> None:
    block = sound.layers[1]
    turned = tuple(
        replace(sample, seconds=sample.seconds * (3 if sample.count == 1 else 1))
        for sample in block.decode
    )
    (doubt,) = quality_warnings(fit_profile(with_block(sound, decode=turned)))
    assert doubt.startswith("the decode fit of its block misses the points by ") and doubt.endswith(
        "differ by 1%"
    )
    # The same points from repeats that differ as much are busy, and miss nothing.
    vague = tuple(replace(sample, spread=0.6) for sample in turned)
    (doubt,) = quality_warnings(fit_profile(with_block(sound, decode=vague, prefill=block.prefill)))
    assert doubt.startswith("busy while measured")


def test_a_plan_names_the_profiles_it_should_not_rest_on(sound: ComputeProfile) -> None:
    problem = problem_of(sound)
    assert doubtful(problem) == {} and not any(
        "Doubtful" in line for line in explain(plan(problem))
    )
    times = {"a": MeasuredTimes.of(sound), "b": MeasuredTimes.of(replace(sound, others_share=0.5))}
    problem = replace(problem, times=times)
    words = "busy while measured (others took 50% of its cores)"
    assert doubtful(problem) == {"b": (words,)}
    result = plan(problem)
    assert result.placement == "a=0:24", "it is not even used: had it been quiet, it might be"
    assert f"Doubtful figures of b: {words}. Plan again when they are measured again." in explain(
        result
    )
    assert doubtful(replace(problem, exclude=("b",))) == {}
