"""A head's few numbers against the costs they stand for, and the slices it makes of them."""

from __future__ import annotations

import pytest

from edgeshard.domain.deployments.step_cost import StageCost, inter_token_s
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.step_budget import prompt_slices, slice_unit, stage_costs
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.problem import PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import built_in_model
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import score
from tests.planning.oracles.slicings import slicing_seconds

CUT = Cut((0, 1), (16, 32))
EVEN = StageCost((1, 2048), (0.01, 0.02), (0.01, 2.057), 0.0, 1e-6, 0.001, 0.0, 1e-5)
"""10 ms and 1 ms a token of prompt, and 10 us a token on the link."""


@pytest.fixture(scope="module")
def costs() -> Costs:
    cluster = parse_cluster(
        {
            "source": "a",
            "device": [{"name": "a", "kind": "agx-orin"}, {"name": "b", "kind": "rtx-3090"}],
            "link": {"bandwidth_bps": 100e6, "latency_s": 0.002},
        }
    )
    model = built_in_model("llama2-7b")
    assert model is not None
    return Costs(PlanProblem(model, cluster, prompt_tokens=512, new_tokens=128))


@pytest.mark.parametrize("batch", [1, 2, 8, 24])
def test_a_decode_step_costs_what_the_plan_says(costs: Costs, batch: int) -> None:
    decode = score(costs.decode(Load(batch)), CUT)
    middle = costs.problem.prompt_tokens + costs.problem.new_tokens // 2
    pieces = [(middle - 1, 1)] * batch
    for stage, planned_s in zip(stage_costs(costs, CUT), decode.stage_s, strict=True):
        assert stage.step_s(pieces) == pytest.approx(planned_s, rel=0.02)


@pytest.mark.parametrize("load", [Load(1, 1), Load(8, 4)])
def test_tokens_come_as_the_plan_says(costs: Costs, load: Load) -> None:
    decode = score(costs.decode(load), CUT)
    middle = costs.problem.prompt_tokens + costs.problem.new_tokens // 2
    found = inter_token_s(
        stage_costs(costs, CUT), [(middle - 1, 1)] * load.batch, load.micro_batches
    )
    assert found == pytest.approx(
        max(decode.round_s, load.micro_batches * decode.bottleneck_s), rel=0.02
    )


@pytest.mark.parametrize(("tokens", "before"), [(64, 0), (300, 0), (512, 512), (1500, 0)])
def test_a_chunk_costs_what_the_model_says(costs: Costs, tokens: int, before: int) -> None:
    phase = StepShape.of_spans([(tokens, before)])
    for index, stage in enumerate(stage_costs(costs, CUT)):
        times = costs.times[index]
        exact = sum(
            times.block_s(block, phase)
            for block in costs.problem.model.blocks[16 * index : 16 * index + 16]
        )
        exact += times.step_s(0) + (
            times.embedding_s(phase) if index == 0 else times.head_s(StepShape(1, 1, 1, 1))
        )
        assert stage.step_s([(before, tokens)]) == pytest.approx(exact, rel=0.1)


def test_a_chunk_beside_decodes_costs_more_than_either(costs: Costs) -> None:
    (stage, _) = stage_costs(costs, CUT)
    decodes, chunk = [(600, 1)] * 8, [(0, 256)]
    both = stage.step_s([*decodes, *chunk])
    assert (
        max(stage.step_s(decodes), stage.step_s(chunk))
        < both
        < stage.step_s(decodes) + stage.step_s(chunk)
    )


@pytest.mark.parametrize("tokens", [1, 63, 64, 200, 1024, 1500, 4096, 32000])
def test_slices_sum_to_the_prompt(tokens: int) -> None:
    lengths = prompt_slices((EVEN, EVEN, EVEN), tokens)
    assert sum(lengths) == tokens and min(lengths) > 0
    assert all(length % slice_unit(tokens) == 0 for length in lengths[:-1])


def test_a_long_prompt_is_sliced_and_gains() -> None:
    stages = (EVEN, EVEN)
    lengths = prompt_slices(stages, 4608)
    assert len(lengths) > 1 and list(lengths) == sorted(lengths, reverse=True), (
        "later slices attend to more"
    )

    def seconds(parts: tuple[int, ...]) -> float:
        unit = slice_unit(4608)
        computing = [lambda first, count: EVEN.step_s([(first * unit, count * unit)])] * 2
        return slicing_seconds(
            computing, [part // unit for part in parts], lambda count: EVEN.transfer_s(count * unit)
        )

    # docs/papers.md#slices-of-long-prompts: two equal stages can halve the time at best.
    assert 0.5 < seconds(lengths) / seconds((4608,)) < 0.75


def test_one_stage_has_nothing_to_overlap() -> None:
    assert prompt_slices((EVEN,), 4096) == (4096,)
