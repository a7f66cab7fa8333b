"""FlexGen's fractions: never worse than a grid, the cost of one tier less, and its own table's
results."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from bench.flexgen_paper.__main__ import NVME, OUTPUT, files
from bench.flexgen_paper.machine import OPT_30B, OPT_175B, T4, TierMachine, TierModel, TierWorkload
from bench.flexgen_paper.offloading import (
    FLEXGEN,
    Runtime,
    best_at,
    best_fractions,
    best_policy,
    frontier,
    policies,
    tier_costs,
)
from edgeshard.planning.solvers.instance import Floats

WORK = TierWorkload()
_PARTS = 5


def _grid() -> Floats:
    """[K, 9] all fractions in fifths."""
    thirds = [(a, b, _PARTS - a - b) for a in range(_PARTS + 1) for b in range(_PARTS + 1 - a)]
    return np.array([sum(rows, ()) for rows in product(thirds, repeat=3)]) / _PARTS


GRID = _grid()


def _random_case(
    random: np.random.Generator,
) -> tuple[TierMachine, TierModel, TierWorkload, Runtime, int, int]:
    model = TierModel(
        "random",
        int(random.integers(2, 100)),
        hidden := 128 * int(random.integers(2, 100)),
        int(hidden * random.uniform(1, 4)),
        hidden // 128,
    )
    machine = TierMachine(
        **{
            item.name: getattr(T4, item.name) * random.uniform(0.2, 5)
            for item in fields(TierMachine)
        }
    )
    weights = model.layers * model.layer_bytes
    sizes = weights * random.uniform([0.01, 0.05, 0.5], [1.5, 2.0, 6.0])
    machine = replace(
        machine, gpu_bytes=sizes[0], host_bytes=sizes[1], disk_bytes=sizes[2], usable=1.0
    )
    work = TierWorkload(int(random.integers(16, 1024)), int(random.integers(1, 256)))
    runtime = Runtime(
        compressed=bool(random.integers(2)),
        overlap=bool(random.integers(2)),
        host_attention=bool(random.integers(2)),
        fixed={},
    )
    return machine, model, work, runtime, int(random.integers(1, 17)), int(random.integers(1, 9))


def test_no_grid_is_better_on_200_random_instances() -> None:
    random = np.random.default_rng(7)
    solved = grids = 0
    for number in range(200):
        machine, model, work, runtime, batch, batches = _random_case(random)
        costs = tier_costs(machine, model, work, runtime, batch, batches)
        found = best_fractions(costs, model.layers, work.new, runtime.fixed)
        fitting = GRID[costs.fits(GRID)]
        if found is None:
            assert not len(fitting), number
            continue
        solved += 1
        assert costs.fits(found), number
        assert found.reshape(3, 3).sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-7)
        seconds = float(costs.seconds(found, model.layers, work.new))
        if len(fitting):
            grids += 1
            assert seconds <= costs.seconds(fitting, model.layers, work.new).min() * (1 + 1e-7), (
                number
            )
    assert solved > 120 and grids > 80


def test_zig_zag_reads_a_layer_once_for_all_batches() -> None:
    """Tokens a second grow nearly as the batches do while reading weights is what takes the
    time."""
    alone, eight = (best_at(NVME, OPT_175B, WORK, FLEXGEN, 1, batches) for batches in (1, 8))
    assert alone is not None and eight is not None
    assert eight.tokens_per_s > 6 * alone.tokens_per_s


def test_less_of_anything_is_never_faster() -> None:
    best = best_policy(list(policies(NVME, OPT_30B, WORK)))
    assert best is not None
    for change in (
        {"host_to_gpu": T4.host_to_gpu / 4},
        {"disk_to_host": 1e8},
        {"host_bytes": T4.host_bytes / 4},
    ):
        other = best_policy(list(policies(replace(NVME, **change), OPT_30B, WORK)))
        assert other is not None and other.tokens_per_s <= best.tokens_per_s * (1 + 1e-9)
    assert best_policy(list(policies(replace(NVME, disk_bytes=0.0), OPT_175B, WORK))) is None


def test_a_bound_on_latency_is_kept_and_the_frontier_rises() -> None:
    found = list(policies(NVME, OPT_30B, WORK))
    rising = frontier(found)
    assert [policy.seconds for policy in rising] == sorted(policy.seconds for policy in rising)
    assert [policy.tokens_per_s for policy in rising] == sorted(
        policy.tokens_per_s for policy in rising
    )
    for bound_s in (200, 400, 800):
        best = best_policy(found, bound_s)
        assert best is not None and best.seconds <= bound_s
        assert best.tokens_per_s == max(
            policy.tokens_per_s for policy in rising if policy.seconds <= bound_s
        )
    assert best_policy(found, 0.1) is None


@pytest.mark.long
def test_the_pages_are_what_is_computed_now() -> None:
    """Else run `python -m bench.flexgen_paper`."""
    for name, text in files().items():
        assert (OUTPUT / name).read_text(encoding="utf-8") == text, name
