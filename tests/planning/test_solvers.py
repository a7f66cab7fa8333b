"""Every solver against every other: all plans counted out, subset DP, class DP, label DP and
CP-SAT."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import ModuleType

import numpy as np
import pytest

from edgeshard.planning.solvers import classes, general, solve, subset
from edgeshard.planning.solvers.instance import Instance, Solution
from edgeshard.planning.solvers.scoring import score, violations
from edgeshard.planning.solvers.walks import equal_kinds
from tests.planning.oracles import brute
from tests.planning.oracles.instances import RANDOM_SEEDS, random_instance, random_micro_batches
from tests.planning.oracles.proven import least

SAME = 1e-9


@cache
def reference(seed: int) -> tuple[Solution | None, Solution | None]:
    """Subset DP's latency and throughput."""
    instance = random_instance(seed)
    return subset.solve_round(instance), subset.solve_throughput(
        instance, random_micro_batches(seed)
    )


def check_plan(instance: Instance, found: Solution, m: int | None) -> None:
    """The answer is allowed, and has the cost it states."""
    assert violations(instance, found.cut) == ()
    result = score(instance, found.cut)
    assert found.score == result
    value = result.round_s if m is None else max(result.round_s, m * result.bottleneck_s)
    assert found.value_s == pytest.approx(value, rel=SAME)
    assert found.bound_s <= found.value_s


def check_same(
    found: Solution | None, expected: Solution | None, instance: Instance, m: int | None
) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        check_plan(instance, found, m)
        assert found.value_s == pytest.approx(expected.value_s, rel=1e-8)
        assert found.gap == 0


@pytest.mark.long
def test_the_random_instances_cover_the_cases() -> None:
    made = [random_instance(seed) for seed in RANDOM_SEEDS]
    solved = [reference(seed)[0] for seed in RANDOM_SEEDS]
    assert {one.nodes for one in made} == set(range(2, 9))
    assert {one.layers for one in made} == set(range(4, 25))
    for flag in ("asynchronous", "head_on_source"):
        assert {getattr(one, flag) for one in made} == {True, False}
    assert 5 < sum(one is None for one in solved) < 40
    assert sum(one is not None and len(one.cut.nodes) >= 4 for one in solved) > 30


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", range(4))
def test_class_dp_equals_subset_dp(part: int) -> None:
    for seed in RANDOM_SEEDS[part::4]:
        instance, m = random_instance(seed), random_micro_batches(seed)
        latency, throughput = reference(seed)
        check_same(classes.solve_round(instance), latency, instance, None)
        check_same(classes.solve_throughput(instance, m), throughput, instance, m)


def test_subset_dp_equals_every_plan_counted_out() -> None:
    compared = 0
    for seed in RANDOM_SEEDS:
        nodes, layers = 2 + seed % 4, 4 + seed % 7
        instance, m = random_instance(seed, nodes, layers), random_micro_batches(seed)
        for found, wanted in (
            (subset.solve_round(instance), brute.best(instance)[0]),
            (subset.solve_throughput(instance, m), brute.best(instance, m)[0]),
        ):
            assert (found.value_s if found else float("inf")) == pytest.approx(wanted, rel=SAME)
        compared += np.isfinite(wanted)
    assert compared > 150


def test_least_round_under_a_threshold_equals_every_plan_counted_out() -> None:
    for seed in RANDOM_SEEDS[:60]:
        instance = random_instance(seed, 2 + seed % 4, 4 + seed % 6)
        stations = sorted(
            {float(one) for _, _, _, busiest in brute.every_plan(instance) for one in busiest}
        )
        for threshold in stations[:: max(1, len(stations) // 4)]:
            values = [
                one.min() for _, _, one, _ in brute.every_plan(instance, threshold) if len(one)
            ]
            for solver in (subset, classes):
                found = solver.solve_round(instance, threshold)
                assert found is not None
                assert found.value_s == pytest.approx(min(values), rel=SAME)
                assert found.score.bottleneck_s <= threshold * (1 + SAME)
        if stations:
            assert subset.solve_round(instance, stations[0] * 0.999) is None
            assert classes.solve_round(instance, stations[0] * 0.999) is None


@pytest.mark.parametrize("seed", range(20))
def test_cp_sat_agrees(seed: int) -> None:
    instance, m = random_instance(seed, 2 + seed % 5, 4 + seed % 9), random_micro_batches(seed)
    for wanted, found in (
        (least(instance), solve.solve_latency(instance)),
        (least(instance, m), solve.solve_throughput(instance, m)),
    ):
        assert (wanted is None) == (found is None)
        if wanted is not None and found is not None:
            assert found.value_s == pytest.approx(wanted, rel=2e-6)


def test_label_dp_never_claims_more_than_it_proves() -> None:
    worse = 0
    for seed in RANDOM_SEEDS[::2]:
        instance, m = random_instance(seed), random_micro_batches(seed)
        for expected, found, count in (
            (reference(seed)[0], general.solve_round(instance), None),
            (reference(seed)[1], general.solve_throughput(instance, m), m),
        ):
            if expected is None:
                assert found is None
                continue
            assert found is not None, seed
            check_plan(instance, found, count)
            assert found.bound_s <= expected.value_s * (1 + 1e-8)
            assert found.value_s >= expected.value_s * (1 - 1e-8)
            worse += found.value_s > expected.value_s * (1 + 1e-8)
            assert found.gap <= 0.25
    assert worse <= 4


def four_layers() -> Instance:
    """docs/papers.md#the-papers-own-algorithms: the source takes 10 ms a layer, a fast node 1 ms
    with room for two."""
    hop = np.full((2, 2), 5e-3)
    return Instance(
        compute_s=np.repeat([[10e-3], [1e-3]], 4, axis=1),
        embed_s=np.zeros(2),
        head_s=np.zeros(2),
        overhead_s=np.zeros(2),
        hop_s=hop,
        return_s=np.zeros((2, 2)),
        latency_s=np.zeros((2, 2)),
        layer_bytes=np.ones(4),
        embed_bytes=0.0,
        head_bytes=0.0,
        tied_bytes=0.0,
        stage_bytes=0.0,
        capacity_bytes=np.array([4.0, 2.0]),
        max_layers=np.full(2, 4, dtype=np.int64),
    )


@pytest.mark.parametrize("solver", [subset, classes, general, solve])
def test_the_four_layer_case_takes_27_ms(solver: ModuleType) -> None:
    found = solver.solve_round(four_layers())
    assert found.value_s == pytest.approx(27e-3, rel=SAME)
    assert (found.cut.nodes, found.cut.ends) == ((0, 1), (2, 4))


def test_the_least_bottleneck_is_not_the_best_rate() -> None:
    """If least B and least max(R, m B) differ, the latter is returned."""
    differ = 0
    for seed in RANDOM_SEEDS[:60]:
        instance = random_instance(seed, 2 + seed % 4, 4 + seed % 6)
        expected, _ = brute.best(instance, 2)
        ranked = [
            (float(b), float(max(r, 2 * b)))
            for _, _, rounds, busiest in brute.every_plan(instance)
            for r, b in zip(rounds, busiest, strict=True)
        ]
        if ranked:
            differ += min(ranked)[1] > expected * (1 + 1e-6)
            found = solve.solve_throughput(instance, 2)
            assert found is not None and found.value_s == pytest.approx(expected, rel=SAME)
    assert differ > 10


def grouped(seed: int) -> Instance:
    """A random instance whose nodes form threes of equal ones; node 0 is single."""
    rng = np.random.default_rng(seed)
    base = random_instance(seed, nodes=4, layers=int(rng.integers(5, 14)))
    kind = np.array([0, 1, 1, 2, 2, 2, 3, 3])[rng.permutation(8)]
    kind = np.concatenate([[0], kind[kind != 0]])
    spread = np.ix_(kind, kind)
    per_node = ("compute_s", "embed_s", "head_s", "overhead_s", "max_layers")
    links = ("hop_s", "return_s", "latency_s")
    return replace(
        base,
        **{name: getattr(base, name)[kind] for name in per_node},
        **{name: getattr(base, name)[spread] for name in links},
        capacity_bytes=np.ceil(base.capacity_bytes[kind] / 1.6),
    )


@pytest.mark.long
def test_class_dp_on_real_classes_equals_subset_dp() -> None:
    shared = 0
    for seed in range(60):
        instance, m = grouped(seed), random_micro_batches(seed)
        kinds = equal_kinds(instance, 8)
        assert kinds is not None and sorted(map(len, kinds.members)) == [1, 2, 2, 3]
        expected = subset.solve_round(instance)
        check_same(classes.solve_round(instance, kinds=kinds), expected, instance, None)
        check_same(
            classes.solve_throughput(instance, m, kinds),
            subset.solve_throughput(instance, m),
            instance,
            m,
        )
        shared += expected is not None and len(expected.cut.nodes) > 4
    assert shared > 5, "no plan used two nodes of a class"


@pytest.mark.parametrize("bounds", [(1, 2), (3, 8), (2, 3), (1, 1)])
def test_stage_bounds_hold(bounds: tuple[int, int]) -> None:
    for seed in range(40):
        instance = replace(
            random_instance(seed, 2 + seed % 4, 4 + seed % 6),
            min_nodes=bounds[0],
            max_nodes=bounds[1],
        )
        wanted, _ = brute.best(instance)
        for solver in (subset, classes):
            found = solver.solve_round(instance)
            assert (found.value_s if found else float("inf")) == pytest.approx(wanted, rel=SAME), (
                seed,
                solver,
            )
            assert found is None or bounds[0] <= len(found.cut.nodes) <= bounds[1]


def test_nodes_may_be_kept_out_and_links_be_missing() -> None:
    for seed in range(60):
        made = random_instance(seed, 2 + seed % 4, 4 + seed % 6)
        rng = np.random.default_rng(seed)
        hop = np.where(rng.random(made.hop_s.shape) < 0.4, np.inf, made.hop_s)
        most = rng.integers(0, made.layers + 1, made.nodes)
        most[0] = max(most[0], 1)
        instance = replace(made, hop_s=hop, max_layers=most)
        wanted, _ = brute.best(instance)
        for solver in (subset, classes):
            found = solver.solve_round(instance)
            assert (found.value_s if found else float("inf")) == pytest.approx(wanted, rel=SAME), (
                seed,
                solver,
            )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_node_that_cannot_send_is_no_stage_but_the_last(asynchronous: bool) -> None:
    """Without any link out and without a threshold nothing is left of infinity less infinity."""
    for seed in range(20):
        made = random_instance(seed, 2 + seed % 4, 4 + seed % 6, asynchronous=asynchronous)
        hop, back = made.hop_s.copy(), made.return_s.copy()
        hop[-1] = np.inf
        if seed % 2:
            back[-1] = np.inf
        if seed % 3 == 0:
            hop[made.source] = np.inf
        instance = replace(made, hop_s=hop, return_s=back)
        wanted, _ = brute.best(instance)
        for solver in (subset, classes, general):
            found = solver.solve_round(instance)
            assert (found.value_s if found else float("inf")) == pytest.approx(wanted, rel=SAME), (
                seed,
                solver,
            )
