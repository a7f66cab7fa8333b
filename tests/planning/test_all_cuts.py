"""Every cut counted out as arrays: the same as one by one, scored and filtered as every other
answer is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from edgeshard.planning.solvers.all_cuts import Cuts, count_cuts, every_cut, kinds_of_all, scores
from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.scoring import score, violations
from edgeshard.planning.solvers.walks import single_kinds
from tests.planning.oracles.instances import random_instance


def one_by_one(instance: Instance) -> set[Cut]:
    """All cuts that break no rule, without a single array."""
    others = [node for node in range(instance.nodes) if node != instance.source]
    found = set()
    for count in range(instance.nodes):
        for rest in permutations(others, count):
            for ends in combinations(range(1, instance.layers), count):
                cut = Cut((instance.source, *rest), (*ends, instance.layers))
                if not violations(instance, cut):
                    found.add(cut)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_cut_is_there_once_and_scored_as_any_other(seed: int) -> None:
    instance = random_instance(seed, nodes=2 + seed % 3, layers=3 + seed % 5)
    if seed % 3 == 0:
        rng = np.random.default_rng(seed)
        most = rng.integers(0, instance.layers + 1, instance.nodes)
        hop = np.where(rng.random(instance.hop_s.shape) < 0.3, np.inf, instance.hop_s)
        instance = replace(
            instance, max_layers=most, hop_s=hop, min_nodes=1 + seed % 2, max_nodes=2 + seed % 3
        )
    every = single_kinds(instance)
    seen: list[Cut] = []
    for cuts in every_cut(instance, every, part=17):
        rounds, busiest = scores(instance, cuts)
        for index in range(len(cuts)):
            cut = cuts.cut(index)
            expected = score(instance, cut)
            assert rounds[index] == pytest.approx(expected.round_s, rel=1e-12)
            assert busiest[index] == pytest.approx(expected.bottleneck_s, rel=1e-12)
            seen.append(cut)
    assert len(seen) == len(set(seen)) <= count_cuts(instance, every)
    assert set(seen) == one_by_one(instance)


def test_where_nothing_is_short_as_many_as_were_counted() -> None:
    made = random_instance(3, nodes=4, layers=6)
    instance = replace(made, capacity_bytes=np.full(4, 1e9))
    every = single_kinds(instance)
    assert sum(map(len, every_cut(instance, every))) == count_cuts(instance, every)
    assert count_cuts(replace(instance, max_nodes=2), every) == 1 + 3 * 5


def test_of_equal_nodes_only_the_first_ones_are_tried() -> None:
    made = random_instance(5, nodes=2, layers=5)
    kind = np.array([0, 1, 1, 1])
    spread = np.ix_(kind, kind)
    per_node = ("compute_s", "embed_s", "head_s", "overhead_s", "capacity_bytes", "max_layers")
    links = ("hop_s", "return_s", "latency_s")
    instance = replace(
        made,
        **{name: getattr(made, name)[kind] for name in per_node},
        **{name: getattr(made, name)[spread] for name in links},
    )
    kinds = kinds_of_all([instance])
    assert kinds.members == ((0,), (1, 2, 3))
    assert kinds_of_all(
        [instance, replace(instance, head_s=np.array([0.1, 0.2, 0.2, 0.3]))]
    ).members == (
        (0,),
        (1, 2),
        (3,),
    )
    few = [cuts.cut(index) for cuts in every_cut(instance) for index in range(len(cuts))]
    assert all(cut.nodes == tuple(range(len(cut.nodes))) for cut in few)
    values = {score(instance, cut).round_s for cut in one_by_one(instance)}
    assert {round(score(instance, cut).round_s, 12) for cut in few} == {
        round(value, 12) for value in values
    }
    assert count_cuts(instance) == 1 + 4 + 6 + 4


def test_arrays_and_cuts_are_the_same() -> None:
    cuts = [Cut((0, 2), (3, 6)), Cut((0, 1), (1, 6))]
    made = Cuts.of(cuts)
    assert [made.cut(0), made.cut(1)] == cuts
    assert made.starts.tolist() == [[0, 3], [0, 1]] and made.receivers.tolist() == [[2, 0], [1, 0]]
