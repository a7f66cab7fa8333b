"""Attention and MLP halves sum to their block, and the best cuts by halves are no worse than the
best by blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.hpipe_paper.experiments import costs_of
from bench.hpipe_paper.halves import HalfCosts, cuts_sooner
from bench.hpipe_paper.testbed import MODELS, cluster, problem
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.devices import with_bandwidth
from edgeshard.planning.inputs.problem import Objective, StepShape
from edgeshard.planning.solvers.all_cuts import every_cut
from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.scoring import score
from edgeshard.planning.solvers.solve import solve_latency, solve_throughput

WHOLE = {name: costs_of(name) for name in MODELS}
HALVES = {name: HalfCosts(costs.problem) for name, costs in WHOLE.items()}
PROMPT = 2047


@given(
    name=st.sampled_from(MODELS),
    node=st.sampled_from((0, 5)),
    tokens=st.integers(1, PROMPT),
    data=st.data(),
)
def test_times_of_halves_sum_to_the_blocks(
    name: str, node: int, tokens: int, data: st.DataObject
) -> None:
    """For the slices of the page. Shorter ones wait for reading, and halves of them may take longer
    than the whole."""
    step = StepShape.of_spans([(tokens, data.draw(st.integers(0, PROMPT - tokens)))])
    block = WHOLE[name].problem.model.blocks[0]
    (attention, mlp) = HALVES[name].problem.model.blocks[:2]
    times = HALVES[name].times[node]
    whole_s = WHOLE[name].times[node].block_s(block, step)
    halves_s = times.block_s(attention, step) + times.block_s(mlp, step)
    assert halves_s >= whole_s * (1 - 1e-9)
    if tokens >= 128:
        assert halves_s == pytest.approx(whole_s, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_cache_of_halves_sum_to_the_blocks(name: str) -> None:
    whole, halves = WHOLE[name].problem.model, HALVES[name].problem.model
    assert len(halves.blocks) == 64 and halves.parameter_count == whole.parameter_count
    for load in (Load(), Load(1, 6)):
        sizes = HALVES[name].prefill(load).layer_bytes.reshape(-1, 2)
        assert sizes.sum(axis=1) == pytest.approx(WHOLE[name].prefill(load).layer_bytes)
        # An MLP has only weights: the matrices of LLaMA are three of 4096 x 11008, with a norm.
        assert sizes[0, 1] == halves.blocks[1].parameters * 2
    assert HALVES[MODELS[0]].problem.model.blocks[1].parameters == 3 * 4096 * 11008 + 4096


def small(name: str, blocks: int, mbps: float, prompt: int = PROMPT) -> Costs:
    """The first blocks of a model, over two RTX 3090 and a P100."""
    found = problem(
        name, with_bandwidth(cluster(), mbps * 1e6, ("rtx", "p100")), Objective.THROUGHPUT
    )
    kept = replace(found.model, blocks=found.model.blocks[:blocks])
    return Costs(
        replace(found, model=kept, prompt_tokens=prompt, exclude=("p100-2", "p100-3", "p100-4"))
    )


@given(
    name=st.sampled_from(MODELS),
    blocks=st.integers(1, 3),
    mbps=st.floats(100, 1e6),
    micro_batches=st.integers(1, 16),
)
def test_no_plan_of_whole_blocks_is_better_than_the_best_by_halves(
    name: str, blocks: int, mbps: float, micro_batches: int
) -> None:
    whole = small(name, blocks, mbps)
    own, halves = whole.prefill(Load()), HalfCosts(whole.problem).prefill(Load())
    doubled = {
        cut: score(halves, Cut(cut.nodes, tuple(2 * end for end in cut.ends)))
        for cut in cuts_of(own)
    }
    for cut, by_halves in doubled.items():
        assert by_halves.round_s == pytest.approx(score(own, cut).round_s)
    scores = [score(halves, cut) for cut in cuts_of(halves)]
    least, steady = solve_latency(halves), solve_throughput(halves, micro_batches)
    assert least is not None and steady is not None
    assert least.value_s == pytest.approx(min(one.round_s for one in scores))
    assert steady.value_s == pytest.approx(
        min(max(one.round_s, micro_batches * one.bottleneck_s) for one in scores)
    )
    for found, best in (
        (least, solve_latency(own)),
        (steady, solve_throughput(own, micro_batches)),
    ):
        assert best is not None and found.value_s <= best.value_s * (1 + 1e-9)


def cuts_of(instance: Instance) -> list[Cut]:
    return [part.cut(place) for part in every_cut(instance) for place in range(len(part))]


@pytest.mark.parametrize("name", MODELS)
def test_the_cuts_that_are_sooner_are_those_of_brute_force(name: str) -> None:
    costs = HalfCosts(small(name, 4, 1000).problem)
    times = PromptTimes(costs)
    seconds = {cut: times.first_token(cut).seconds for cut in cuts_of(costs.decode(Load()))}
    limit_s = float(np.quantile(list(seconds.values()), 0.3))
    found, searched = cuts_sooner(costs, limit_s)
    assert {cut for cut, own in seconds.items() if own < limit_s} == set(found) != set()
    assert len(found) <= searched <= len(seconds)
