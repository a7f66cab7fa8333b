"""Invariants of HPipe's test bed, computed as `python -m bench.hpipe_paper` does.
tests/house/test_benches.py runs its `--check` of whole pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.hpipe_paper import measured, schedules
from bench.hpipe_paper.experiments import Outcome, costs_of, in_flight, outcome, table, utilisation
from bench.hpipe_paper.testbed import MODELS, PROMPTS, cluster, model
from bench.random_llama import CONFIG
from edgeshard.domain.deployments.placement import Mode
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.energy import energy_j
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.problem import StepShape
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.simulation.simulated_pipeline import ring
from edgeshard.planning.simulation.timing import HopTimes, StageTimes
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
    for name in ("Base", "GPipe", "GP-B", "Megatron-LM", "TeraPipe", "TP-T"):
        other = found[name]
        assert (
            ours.ttft_s < other.ttft_s
            and ours.tokens_per_s > other.tokens_per_s
            and ours.joules < other.joules
        )
    assert ours.memory_bytes < found["GPipe"].memory_bytes


def test_energy_is_the_planners_where_the_planner_has_the_schedule(costs: Costs) -> None:
    """Its own formula is for whole prompts, one after the other."""
    for schedule in (
        schedules.gpipe(costs),
        schedules.balanced_gpipe(costs),
        schedules.one_node(costs),
    ):
        expected = energy_j(costs, schedule.cut, Load(1, PROMPTS))
        assert expected is not None
        assert PROMPTS * outcome(costs, schedule).joules == pytest.approx(expected, rel=1e-9)


def computing(stage: StageTimes) -> StageSeconds:
    return lambda start, length: stage.prefill_s(length, start)


def sending(hop: HopTimes) -> StageSeconds:
    return lambda start, length: hop.station_s(length)


def test_first_tokens_are_those_of_hpipes_recurrence(costs: Costs) -> None:
    """With each link as one more device. The planner's heads also limit how many slices are on
    their way."""
    times = PromptTimes(costs)
    for schedule in (schedules.gpipe(costs), schedules.hpipe(costs), schedules.terapipe(costs)):
        stations: list[StageSeconds] = []
        for stage, hop in zip(schedule.pipeline.stages, schedule.pipeline.hops, strict=True):
            stations += [computing(stage), sending(hop)]
        *_, back = schedule.pipeline.hops
        expected = slicing_seconds(stations[:-1], schedule.slices) + back.station_s(1)
        found = outcome(costs, schedule).ttft_s
        assert found == pytest.approx(expected, rel=1e-9)
        assert found <= times.seconds(schedule.cut, schedule.slices) * (1 + 1e-9)


def test_tensor_parallel_nodes_share_a_block_and_pay_for_their_sums(costs: Costs) -> None:
    divided, tokens = schedules.megatron(costs), costs.problem.prompt_tokens
    whole = ring(costs, divided.cut, 1)
    hidden = tokens * 4096 * 2
    for stage, alone, group, share in zip(
        divided.pipeline.stages, whole.stages, divided.nodes, divided.sums_share, strict=True
    ):
        size, seconds = len(group), stage.prefill_s(tokens, 0)
        assert seconds * (1 - share) == pytest.approx(alone.prefill_s(tokens, 0) / size)
        # 16 blocks, 2 sums each: every node sends its part of the hidden states 2 (D - 1) times.
        assert seconds * share == pytest.approx(
            16 * 2 * 2 * (size - 1) * hidden / size / 10e9, rel=0.01
        )
    assert len(outcome(costs, divided).placement.split(",")) == 2


BY_SPEED = (11, 22, 24, 27, 30, 32)
EVEN = (6, 12, 17, 22, 27, 32)
SLICED = (*[128] * 15, 127)
PAPER = {
    # The cut, the slices, and whether the nodes of a computer share each block. (The paper's six
    # baselines, and HPipe.)
    "Base": (EVEN, (2047,), False),
    "GPipe": (EVEN, (2047,), False),
    "GP-B": (BY_SPEED, (2047,), False),
    "Megatron-LM": ((16, 32), (2047,), True),
    "TeraPipe": (EVEN, SLICED, False),
    "TP-T": ((16, 32), SLICED, True),
    "HPipe": (BY_SPEED, SLICED, False),
}


def test_each_row_is_what_the_paper_names(costs: Costs) -> None:
    rows = {row.name: row for row in (way(costs) for way in schedules.ALL)}
    for name, (ends, slices, is_divided) in PAPER.items():
        row = rows[name]
        assert (row.cut.ends, row.slices) == (ends, slices), name
        assert [len(group) for group in row.nodes] == ([2, 4] if is_divided else [1] * 6), name
        assert (row.mode is Mode.SEQUENTIAL) == (name == "Base"), name


def test_terapipe_with_tensor_parallelism_has_its_figures(found: dict[str, Outcome]) -> None:
    assert found["TP-T"].ttft_s == pytest.approx(0.283, rel=0.01)
    assert found["TP-T"].tokens_per_s == pytest.approx(7687, rel=0.01)


def test_a_slice_uses_no_less_of_a_device_when_it_is_longer() -> None:
    for name in MODELS:
        rtx, p100 = (list(utilisation(name, kind).values()) for kind in ("rtx-3090", "p100"))
        for used in (rtx, p100):
            assert used == sorted(used) and used[-1] == pytest.approx(1)
        # fewer operations a byte
        assert all(slow >= fast * (1 - 1e-9) for slow, fast in zip(p100, rtx, strict=True))
    # One token: two operations for each weight of two bytes.
    assert p100[0] == pytest.approx(732e9 / 18.7e12, rel=0.01)


def test_measured_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = measured.Measured(
        "a core", "avx2", 90.0, 30.0, 128, {1: 0.25, 6: 0.8}, {0: 0.85}, {1: 0.33, 6: 1.0}
    )
    measured.write(tmp_path / "kernels.json", found)
    assert measured.read(tmp_path / "kernels.json") == found


def test_operations_of_a_slice_are_the_planners() -> None:
    block = model_from_config("random", CONFIG).blocks[0]
    spec = model_from_config("random", CONFIG)
    shape = StepShape.of_spans([(128, 512)])
    expected = 2.0 * block.active_parameters * 128 + spec.attention_flops(block, 128, shape.context)
    norms = 2 * 2.0 * CONFIG["hidden_size"] * 128
    blocks = len(measured.LAYERS)
    assert measured.operations(512, 128) == pytest.approx(blocks * (expected - norms), rel=1e-6)


def test_a_prompt_holds_memory_as_long_as_it_is_on_its_way() -> None:
    """A prompt of 1 s in all and 0.25 s on the busiest node: four at once keep that node busy."""
    assert in_flight(1.0, 1.0 + 0.25 * (PROMPTS - 1)) == 4
    assert in_flight(1.0, float(PROMPTS)) == 1
    assert in_flight(1.0, 1.0 + 0.01 * (PROMPTS - 1)) == PROMPTS


def test_a_schedule_without_the_memory_says_how_much_is_missing(costs: Costs) -> None:
    nodes = tuple(
        replace(node, device=replace(node.device, memory_bytes=8e9))
        for node in costs.problem.cluster.nodes
    )
    small = Costs(replace(costs.problem, cluster=replace(costs.problem.cluster, nodes=nodes)))
    lacking = outcome(small, schedules.one_node(small))
    assert not lacking.runs and "GB short" in lacking.reason
    assert outcome(small, schedules.gpipe(small)).runs


def test_equal_slices_are_the_whole_prompt() -> None:
    assert schedules.equal_slices(2047, 16) == (*[128] * 15, 127)
    assert schedules.equal_slices(5, 1) == (5,)
