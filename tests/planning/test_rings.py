"""A plan's cut in the simulator gives the plan's own figures, and effects that no formula has:
slices, modes, growth.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.devices import Cluster, parse_cluster
from edgeshard.planning.inputs.problem import ComputeTimes, PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec, ModelSpec, built_in_model
from edgeshard.planning.search.plan import predict
from edgeshard.planning.simulation.serving import Schedule, ServedRequest, StepSpan, serve
from edgeshard.planning.simulation.simulated_pipeline import ring, serving_ring, traffic
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import SimulatedTraffic
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import score

CUTS = (
    Cut((0,), (32,)),
    Cut((0, 2), (10, 32)),
    Cut((0, 1, 2), (4, 12, 32)),
    Cut((0, 2, 1), (4, 4, 32)),
)


def cluster() -> Cluster:
    return parse_cluster(
        {
            "source": "a",
            "device": [
                {"name": "a", "kind": "agx-orin", "step_overhead_s": 0.002},
                {"name": "b", "kind": "orin-nx"},
                {"name": "c", "kind": "rtx-3090", "up_bps": 40e6},
            ],
            "link": [
                {"bandwidth_bps": 100e6, "latency_s": 0.003},
                {"from": "a", "to": "c", "bandwidth_bps": 20e6, "latency_s": 0.01},
            ],
        }
    )


def model() -> ModelSpec:
    found = built_in_model("llama2-7b")
    assert found is not None
    return found


def problem(**changes: object) -> PlanProblem:
    base = PlanProblem(model(), cluster(), prompt_tokens=64, new_tokens=33, dtype=DType.BFLOAT16)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", CUTS)
def test_of_slices_only_the_last_is_sampled_from(cut: Cut) -> None:
    """So slices take the planner's time if none waits for another to return."""
    costs = Costs(problem(prompt_tokens=256))
    slices = (128, 128)
    found = simulate(ring(costs, cut, 1), traffic(costs.problem, 1, 1, slices))
    if len(cut.nodes) > 1:
        assert found.ttft_s == pytest.approx(PromptTimes(costs).seconds(cut, slices), rel=1e-9)
    head_s = costs.times[cut.nodes[-1]].head_s(StepShape(1, 1, 1, 1))
    last = ring(costs, cut, 1).stages[-1]
    longer = replace(costs.problem, prompt_tokens=512)
    assert last.prefill_s(128, 128) - ring(Costs(longer), cut, 1).stages[-1].prefill_s(
        128, 128
    ) == pytest.approx(head_s)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("head_on_source", [False, True])
@pytest.mark.parametrize("load", [Load(), Load(2, 1), Load(3, 4)])
def test_the_simulator_gives_what_the_plan_predicts(
    cut: Cut, head_on_source: bool, load: Load
) -> None:
    costs = Costs(problem(head_on_source=head_on_source))
    expected = predict(costs, load, cut)
    found = simulate(
        ring(costs, cut, load.batch), traffic(costs.problem, load.batch, load.micro_batches)
    )
    if load.micro_batches == 1:
        assert found.ttft_s == pytest.approx(expected.prefill.round_s, rel=1e-9)
        assert found.inter_token_s == pytest.approx(expected.decode.round_s, rel=1e-6)
    assert found.worst_ttft_s == pytest.approx(expected.ttft_s, rel=0.01)
    assert found.tokens_per_s == pytest.approx(expected.throughput_tps, rel=0.02)


def test_a_node_that_computes_and_sends_in_turn_is_one_station() -> None:
    costs = Costs(problem(asynchronous=False))
    cut, load = CUTS[2], Load(1, 8)
    busiest_s = score(costs.decode(load), cut).bottleneck_s
    work = SimulatedTraffic(1, 8, prompt_tokens=64, new_tokens=200, decode_only=True)
    assert simulate(ring(costs, cut, 1), work).tokens_per_s == pytest.approx(
        1 / busiest_s, rel=0.02
    )


def test_a_measured_node_is_simulated_with_its_own_times() -> None:
    class Measured:
        def block_s(self, block: BlockSpec, phase: StepShape) -> float:
            return 0.001 * phase.step_tokens + 1e-5 * phase.kv_tokens

        def embedding_s(self, phase: StepShape) -> float:
            return 0.5

        def head_s(self, phase: StepShape) -> float:
            return 0.25

        def step_s(self, hidden_bytes: float) -> float:
            return 0.125

    measured: ComputeTimes = Measured()
    costs = Costs(problem(times={"a": measured}, prompt_tokens=10, new_tokens=2))
    run = simulate(ring(costs, CUTS[0], 1), traffic(costs.problem, 1, 1))
    assert run.ttft_s == pytest.approx(32 * (0.01 + 1e-4) + 0.875)
    assert run.inter_token_s == pytest.approx(32 * (0.001 + 11e-5) + 0.875)


def test_slices_bring_the_first_token_sooner_where_computing_is_what_takes_time() -> None:
    costs = Costs(problem(prompt_tokens=2048, new_tokens=1, dtype=DType.FLOAT32))
    cut = Cut((0, 1, 2), (12, 18, 32))
    pipeline = ring(costs, cut, 1)
    whole = simulate(pipeline, traffic(costs.problem, 1, 1)).ttft_s
    sliced = simulate(pipeline, traffic(costs.problem, 1, 1, slices=(256,) * 8)).ttft_s
    assert sliced < 0.75 * whole


def test_a_served_batch_takes_what_the_plan_says() -> None:
    """Prompts in steps of their own, then only decodes: the mixed ring's steps equal the steps of
    the two phases."""
    costs = Costs(problem(prompt_tokens=64, new_tokens=40))
    cut = CUTS[2]
    expected = simulate(ring(costs, cut, 1), traffic(costs.problem, 1, 2))
    requests = [ServedRequest(0.0, 64, 40)] * 2
    result = serve(serving_ring(costs, cut), requests, Schedule(micro_batches=2, token_budget=64))
    for times, wanted in zip(result.token_s, expected.token_s, strict=True):
        assert times == pytest.approx(wanted)


def test_a_chunk_among_decodes_costs_less_than_a_step_of_its_own() -> None:
    """Weights are read once for both, and the chunk's own hop and overhead fall away."""
    (stage,) = serving_ring(Costs(problem()), CUTS[0]).stages
    decodes = [StepSpan(index, 1, 500, True) for index in range(4)]
    chunk = [StepSpan(9, 32, 64, False)]
    assert (
        max(stage(decodes), stage(chunk))
        < stage(decodes + chunk)
        < 0.75 * (stage(decodes) + stage(chunk))
    )


def test_a_head_on_the_source_is_not_served() -> None:
    with pytest.raises(InvalidArgumentError, match="head_on_source"):
        serving_ring(Costs(problem(head_on_source=True)), CUTS[1])
