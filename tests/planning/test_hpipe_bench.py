"""What must hold of HPipe's test bed, computed as `python -m bench.hpipe_paper` does; its `--check`, of whole
pages, is run by tests/house/test_benches.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.hpipe_paper import schedules
from bench.hpipe_paper.experiments import Outcome, costs_of, in_flight, memory, outcome, table, utilisation
from bench.hpipe_paper.testbed import MODELS, PROMPTS, cluster, model
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.energy import energy_j
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.simulation.simulated_pipeline import ring
from edgeshard.planning.simulation.timing import HopTimes, StageTimes
from edgeshard.planning.solvers.instance import Cut
from tests.planning.oracles.slicings import StageSeconds, slicing_seconds

LLAMA, GPT = MODELS


@pytest.fixture(scope="module")
def costs() -> Costs:
    return costs_of(LLAMA)


@pytest.fixture(scope="module")
def found() -> dict[str, Outcome]:
    return {row.name: row for row in table(LLAMA)}


def test_the_models_have_the_sizes_that_they_are_named_for() -> None:
    assert model(LLAMA).parameter_count == pytest.approx(6.7e9, rel=0.01)
    assert model(GPT).parameter_count == pytest.approx(2.7e9, rel=0.02)
    assert [node.device.kind for node in cluster().nodes] == ["rtx-3090"] * 2 + ["p100"] * 4


def test_hpipe_is_ahead_of_every_other_use_of_all_nodes(found: dict[str, Outcome]) -> None:
    ours = found["HPipe"]
    for name in ("layers in turn", "batches, even layers", "batches, balanced layers", "equal slices, even layers"):
        other = found[name]
        assert ours.ttft_s < other.ttft_s and ours.tokens_per_s > other.tokens_per_s and ours.joules < other.joules
    assert ours.memory_bytes < found["batches, even layers"].memory_bytes


def test_energy_is_the_planners_where_the_planner_has_the_schedule(costs: Costs) -> None:
    """Whole prompts, one behind the other, are what its own formula is of."""
    for schedule in (schedules.even_batches(costs), schedules.balanced_batches(costs), schedules.one_node(costs)):
        expected = energy_j(costs, schedule.cut, Load(1, PROMPTS))
        assert expected is not None
        assert PROMPTS * outcome(costs, schedule).joules == pytest.approx(expected, rel=1e-9)


def computing(stage: StageTimes) -> StageSeconds:
    return lambda start, length: stage.prefill_s(length, start)


def sending(hop: HopTimes) -> StageSeconds:
    return lambda start, length: hop.station_s(length)


def test_first_tokens_are_those_of_hpipes_recurrence(costs: Costs) -> None:
    """With each link as one more device. The planner's heads also limit how many slices are on their way."""
    times = PromptTimes(costs)
    for schedule in (schedules.even_batches(costs), schedules.hpipe(costs), schedules.even_slices(costs)):
        stations: list[StageSeconds] = []
        for stage, hop in zip(schedule.pipeline.stages, schedule.pipeline.hops, strict=True):
            stations += [computing(stage), sending(hop)]
        *_, back = schedule.pipeline.hops
        expected = slicing_seconds(stations[:-1], schedule.slices) + back.station_s(1)
        found = outcome(costs, schedule).ttft_s
        assert found == pytest.approx(expected, rel=1e-9)
        assert found <= times.seconds(schedule.cut, schedule.slices) * (1 + 1e-9)


def test_tensor_parallel_nodes_share_a_block_and_pay_for_their_sums(costs: Costs) -> None:
    divided, tokens = schedules.tensor_parallel(costs), costs.problem.prompt_tokens
    whole = ring(costs, divided.cut, 1)
    hidden = tokens * 4096 * 2
    for stage, alone, group, share in zip(
        divided.pipeline.stages, whole.stages, divided.nodes, divided.sums_share, strict=True
    ):
        size, seconds = len(group), stage.prefill_s(tokens, 0)
        assert seconds * (1 - share) == pytest.approx(alone.prefill_s(tokens, 0) / size)
        # 16 blocks, 2 sums each: every node sends its part of the hidden states 2 (D - 1) times.
        assert seconds * share == pytest.approx(16 * 2 * 2 * (size - 1) * hidden / size / 10e9, rel=0.01)
    assert len(outcome(costs, divided).placement.split(",")) == 2


def test_tensor_parallel_nodes_of_both_computers_work_as_long_and_wait_for_the_link(costs: Costs) -> None:
    divided, tokens = schedules.tensor_parallel_all(costs), costs.problem.prompt_tokens
    ((stage,), (group,), (parts,), (share,)) = (
        divided.pipeline.stages,
        divided.nodes,
        divided.parts,
        divided.sums_share,
    )
    alone = costs.prefill(Load()).compute_s.sum(axis=1)
    assert sum(parts) == pytest.approx(1) and sorted(group) == list(range(6))
    assert np.ptp([part * alone[node] for node, part in zip(group, parts, strict=True)]) < 1e-9
    # 32 blocks, 2 sums each: every node sends a sixth of the hidden states ten times, at the pace of 1 Gb/s.
    seconds = stage.prefill_s(tokens, 0)
    assert seconds * share == pytest.approx(32 * 2 * 10 * tokens * 4096 * 2 / 6 * 8 / 1e9, rel=0.01)
    whole = sum(use.weights for use in costs.memory(Load(), Cut((0,), (32,))))
    assert sum(use.weights for use in memory(costs, divided, 1)) == pytest.approx(whole, abs=6)


def test_a_slice_uses_no_less_of_a_device_when_it_is_longer() -> None:
    for name in MODELS:
        rtx, p100 = (list(utilisation(name, kind).values()) for kind in ("rtx-3090", "p100"))
        for used in (rtx, p100):
            assert used == sorted(used) and used[-1] == pytest.approx(1)
        assert all(slow >= fast * (1 - 1e-9) for slow, fast in zip(p100, rtx, strict=True))  # fewer operations a byte
    # One token: two operations for each weight of two bytes.
    assert p100[0] == pytest.approx(732e9 / 18.7e12, rel=0.01)


def test_a_prompt_holds_memory_as_long_as_it_is_on_its_way() -> None:
    """A prompt of 1 s in all and 0.25 s on the busiest node: four at once keep that node busy."""
    assert in_flight(1.0, 1.0 + 0.25 * (PROMPTS - 1)) == 4
    assert in_flight(1.0, float(PROMPTS)) == 1
    assert in_flight(1.0, 1.0 + 0.01 * (PROMPTS - 1)) == PROMPTS


def test_a_schedule_without_the_memory_says_how_much_is_missing(costs: Costs) -> None:
    nodes = tuple(replace(node, device=replace(node.device, memory_bytes=8e9)) for node in costs.problem.cluster.nodes)
    small = Costs(replace(costs.problem, cluster=replace(costs.problem.cluster, nodes=nodes)))
    lacking = outcome(small, schedules.one_node(small))
    assert not lacking.runs and "GB short" in lacking.reason
    assert outcome(small, schedules.even_batches(small)).runs


def test_equal_slices_are_the_whole_prompt() -> None:
    assert schedules.equal_slices(2047, 16) == (*[128] * 15, 127)
    assert schedules.equal_slices(5, 1) == (5,)
