"""The invariants of any instance: memory, the source, and that more nodes or bandwidth never hurt
an exact solver."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgeshard.planning.solvers import classes, general, solve, subset
from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.scoring import score, stage_bytes, violations
from tests.planning.oracles.instances import random_instance

PER_NODE = ("compute_s", "embed_s", "head_s", "overhead_s", "capacity_bytes", "max_layers")
LINKS = ("hop_s", "return_s", "latency_s")
EXACT = (subset, classes)
seeds = st.integers(0, 100_000)
batches = st.integers(1, 8)
few = settings(max_examples=25, deadline=None)


def chosen(instance: Instance, nodes: np.ndarray) -> Instance:
    """The instance over these nodes, in this order; the source must be among them."""
    fields = {name: getattr(instance, name)[nodes] for name in PER_NODE}
    fields |= {name: getattr(instance, name)[np.ix_(nodes, nodes)] for name in LINKS}
    return replace(instance, **fields, source=int(np.flatnonzero(nodes == instance.source)[0]))


def small(seed: int) -> Instance:
    return random_instance(seed, nodes=2 + seed % 5, layers=4 + seed % 9)


def value(solver: ModuleType, instance: Instance, m: int | None) -> float:
    found = solver.solve_round(instance) if m is None else solver.solve_throughput(instance, m)
    return float("inf") if found is None else float(found.value_s)


@few
@given(seed=seeds, m=batches)
def test_memory_and_the_source_constraint_always_hold(seed: int, m: int) -> None:
    instance = small(seed)
    for solver in (*EXACT, general, solve):
        for found in (solver.solve_round(instance), solver.solve_throughput(instance, m)):
            if found is None:
                continue
            assert violations(instance, found.cut) == ()
            assert found.cut.nodes[0] == instance.source and found.cut.ends[0] >= 1
            capacity = instance.capacity_bytes[list(found.cut.nodes)]
            assert (np.array(stage_bytes(instance, found.cut)) <= capacity * (1 + 1e-9)).all()


@few
@given(seed=seeds, m=st.one_of(st.none(), batches))
def test_a_node_more_never_makes_the_optimum_worse(seed: int, m: int | None) -> None:
    instance = small(seed)
    assume(instance.nodes > 2)
    without = chosen(instance, np.arange(instance.nodes - 1))
    for solver in EXACT:
        assert value(solver, instance, m) <= value(solver, without, m) * (1 + 1e-8)


@few
@given(seed=seeds, m=st.one_of(st.none(), batches), factor=st.floats(1.1, 20))
def test_more_bandwidth_never_makes_the_optimum_worse(
    seed: int, m: int | None, factor: float
) -> None:
    instance = small(seed)
    rng = np.random.default_rng(seed)
    faster = rng.random(instance.hop_s.shape) < 0.5
    better = replace(
        instance,
        hop_s=np.where(faster, instance.hop_s / factor, instance.hop_s),
        return_s=np.where(faster, instance.return_s / factor, instance.return_s),
    )
    for solver in EXACT:
        assert value(solver, better, m) <= value(solver, instance, m) * (1 + 1e-8)


@few
@given(seed=seeds, m=st.one_of(st.none(), batches))
def test_relabelling_nodes_changes_nothing(seed: int, m: int | None) -> None:
    instance = small(seed)
    order = np.random.default_rng(seed).permutation(instance.nodes)
    for solver in EXACT:
        assert value(solver, chosen(instance, order), m) == pytest.approx(
            value(solver, instance, m), rel=1e-8
        )


def test_violations_name_every_broken_rule() -> None:
    instance = random_instance(0, 3, 6)
    roomy = replace(instance, capacity_bytes=np.full(3, 1e9))
    assert violations(roomy, Cut((0, 1), (3, 6))) == ()
    for cut, word in (
        (Cut((0, 1), (3, 5)), "ends at layer 5"),
        (Cut((0, 1, 0), (2, 4, 6)), "more than one stage"),
        (Cut((1, 0), (3, 6)), "not the source"),
        (Cut((0, 1, 2), (3, 3, 6)), "no layers"),
        (Cut((0, 7), (3, 6)), "no such node"),
        (Cut((0, 1), (6, 3)), "ends at layer 3"),
        (Cut((0, 1, 2), (4, 3, 6)), "do not rise"),
        (Cut((0,), (3, 6)), "1 nodes for 2 ends"),
    ):
        assert any(word in what for what in violations(roomy, cut)), (cut, violations(roomy, cut))
    assert "bytes" in violations(replace(roomy, capacity_bytes=np.ones(3)), Cut((0, 1), (3, 6)))[0]
    assert (
        "link" in violations(replace(roomy, hop_s=np.full((3, 3), np.inf)), Cut((0, 1), (3, 6)))[0]
    )


def test_a_score_is_what_the_definitions_say() -> None:
    ones = np.ones((2, 2))
    instance = replace(
        random_instance(0, 2, 4),
        compute_s=np.array([[1.0] * 4, [2.0] * 4]),
        embed_s=np.array([0.5, 9.0]),
        head_s=np.array([0.25, 0.75]),
        overhead_s=np.array([0.1, 0.2]),
        hop_s=ones * 3.0,
        return_s=ones * 0.3,
        latency_s=ones * 10.0,
        asynchronous=True,
        head_on_source=False,
    )
    cut = Cut((0, 1), (1, 4))
    result = score(instance, cut, names=["alpha", "beta"])
    assert result.stage_s == pytest.approx((1.6, 6.95))
    assert result.hop_s == pytest.approx((3.0, 0.3))
    assert result.round_s == pytest.approx(1.6 + 6.95 + 3.3 + 20)
    assert result.bottleneck_s == pytest.approx(6.95) and result.bottleneck == "compute of beta"
    serial = score(replace(instance, asynchronous=False), cut)
    assert (
        serial.bottleneck_s == pytest.approx(7.25)
        and serial.bottleneck == "compute and sending of node 1"
    )
    at_source = score(replace(instance, head_on_source=True), cut)
    assert at_source.stage_s == pytest.approx((1.85, 6.2))
    slow = score(replace(instance, hop_s=ones * 30), cut, names=["alpha", "beta"])
    assert slow.bottleneck == "link alpha -> beta"
