"""A site cut into disjoint pipelines: the best choice against all there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS, model_from_config
from edgeshard.planning.search.partition import MOST_EXACT, Group, Worth, partition
from edgeshard.planning.search.plan import plan
from tests.support.forms import in_form

SMALL = model_from_config(
    "small", BUILT_IN_CONFIGS["llama2-7b"] | {"num_hidden_layers": 8, "vocab_size": 2000}
)
LAYER = 4 * SMALL.blocks[0].parameters
"""Bytes of a layer in float32."""
SEEDS = 200


def planned_on(random_of: random.Random) -> tuple[list[str], Callable[[Group], Worth[str] | None]]:
    """A random small site, and the planner's result for a pipeline on some of its nodes."""
    names = [f"n{index}" for index in range(random_of.choice((2, 3, 3, 4, 4, 5)))]
    devices = [
        {
            "name": name,
            "memory_bytes": random_of.choice((3, 5, 6, 10, 14)) * LAYER + 0.6e9,
            "bandwidth_bytes_per_s": random_of.choice((20e9, 50e9, 100e9)),
            "flops": random_of.choice((1e12, 10e12)),
        }
        for name in names
    ]
    link = {
        "bandwidth_bps": random_of.choice((1e7, 1e9)),
        "latency_s": random_of.choice((0.0, 0.01)),
    }

    def worth(group: Group) -> Worth[str] | None:
        own = [device for device in devices if device["name"] in group]
        cluster = parse_cluster({"source": group[0], "device": own, "link": link})
        problem = PlanProblem(
            SMALL,
            cluster,
            Objective.THROUGHPUT,
            32,
            32,
            concurrency=4,
            dtype=DType.FLOAT32,
            max_nodes=len(group),
        )
        found = plan(problem, alternatives=0)
        if found.prediction is None:
            return None
        return Worth("+".join(group), found.prediction.throughput_tps, len(found.stages))

    return names, worth


def set_partitions(nodes: list[str]) -> Iterator[list[Group]]:
    """Every way to put some of the nodes into disjoint groups, by the group of the last node."""
    if not nodes:
        yield []
        return
    *others, last = nodes
    yield from set_partitions(others)
    for size in range(len(others) + 1):
        for beside in combinations(others, size):
            left = [node for node in others if node not in beside]
            for groups in set_partitions(left):
                yield [*groups, (*beside, last)]


def kind_of(groups: list[str]) -> str:
    sizes = {"+" in group for group in groups}
    return "mixed" if len(sizes) == 2 else "pipelines" if True in sizes else "boxes"


def test_small_sites_get_the_best_of_all_choices() -> None:
    """One site for each seed; on some of them a pipeline next to single nodes beats both pure
    choices."""
    kinds: dict[str, int] = {}
    for seed in range(in_form(40, SEEDS)):
        names, worth = planned_on(random.Random(seed))
        known = {
            group: worth(group)
            for size in range(1, len(names) + 1)
            for group in combinations(names, size)
        }
        choices = [
            [one for group in groups if (one := known[group]) is not None]
            for groups in set_partitions(names)
            if all(known[group] is not None for group in groups)
        ]
        for count in (None, 1, 2, 3):
            rates = [
                sum(one.rate for one in chosen)
                for chosen in choices
                if chosen and count in (None, len(chosen))
            ]
            found = partition(names, known.__getitem__, count)
            assert (found is None) == (not rates)
            if found is None:
                continue
            assert found.rank[0] == pytest.approx(max(rates), rel=1e-12)
            used = [name for one in found.pipelines for name in one.pipeline.split("+")]
            assert len(used) == len(set(used)) and count in (None, len(found.pipelines))
            if count is None:
                kind = kind_of([one.pipeline for one in found.pipelines])
                kinds[kind] = kinds.get(kind, 0) + 1
    assert set(kinds) == {"mixed", "pipelines", "boxes"}, kinds


def test_larger_sites_find_single_boxes_beside_a_pipeline_of_the_rest() -> None:
    """Two nodes hold the model, six hold a third of it: nothing that is tried is planned twice."""
    names = [f"n{index}" for index in range(8)]
    asked: list[Group] = []

    def worth(group: Group) -> Worth[str] | None:
        asked.append(group)
        thirds = sum(3 if name in names[:2] else 1 for name in group)
        return (
            Worth("+".join(group), 10.0 if len(group) == 1 else 4.0, len(group))
            if thirds >= 3
            else None
        )

    assert len(names) > MOST_EXACT
    found = partition(names, worth)
    assert found is not None and [one.pipeline for one in found.pipelines][:2] == ["n0", "n1"]
    assert found.rank[0] == 24.0 and len(found.pipelines) == 3
    assert len(asked) == len(set(asked)) <= 60
    two = partition(names, worth, 2)
    assert two is not None and two.rank == (20.0, -2)
    assert partition(names, worth, 8) is None
