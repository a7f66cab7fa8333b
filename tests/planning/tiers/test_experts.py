"""Mixtures whose experts are cached: a plan's figures, compared with the agents' cache and its
decisions."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from edgeshard_agent.experts import ExpertTable, ForecastCache

from edgeshard.architectures.units import place_of_expert, tensors_of_units
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.residency import choose_residency, in_disk_blocks, room_for_experts
from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.tier_costs import Streaming
from edgeshard.planning.inputs.shapes import Matrices, model_from_config
from edgeshard.planning.report.describe_tiers import daily_bytes, describe_streaming
from edgeshard.planning.search.plan import plan
from edgeshard.planning.search.tier_steps import streaming_costs
from tests.planning.tiers.test_joint import _CONFIG, _MIXTURE, mixture_problem

LAYERS = 6
EXPERTS = 16
CHOSEN = 2
SIZE = 1 << 20


def test_experts_are_cached_where_two_fit_beside_the_rest_but_not_all() -> None:
    experts = [5000] * 4  # two blocks of a disk each
    each = in_disk_blocks(5000)
    assert (
        room_for_experts(1000, experts, None) is None and room_for_experts(1000, [], 5000) is None
    )
    assert room_for_experts(1000, experts, 1000 + 2 * each - 1) is None
    assert room_for_experts(1000, experts, 1000 + 2 * each) == each, (
        "one computes while one is read"
    )
    assert room_for_experts(1000, experts, 1000 + 4 * each - 1) == 3 * each - 1
    assert room_for_experts(1000, experts, 1000 + 4 * each) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama"])
@pytest.mark.parametrize("quantisation", [None, Quantisation.INT4])
def test_a_block_has_the_experts_that_are_units_of_packed_files(
    family: str, quantisation: Quantisation | None
) -> None:
    config = (_CONFIG if family == "llama" else _MIXTURE) | {
        "model_type": family,
        "num_hidden_layers": 2,
    }
    if family == "mixtral":
        config |= {"num_local_experts": 8}
    model = model_from_config("small", config)
    units = [
        place_of_expert(name) for name in tensors_of_units(config, LayerRange(0, 2), quantisation)
    ]
    for layer, block in enumerate(model.blocks):
        sizes = block.expert_bytes(DType.BFLOAT16, quantisation)
        assert len(sizes) == sum(place is not None and place[0] == layer for place in units)
        part = block.expert_matrices
        others = Matrices(
            *(
                getattr(block.matrices, size) - getattr(part, size)
                for size in ("elements", "int8_bytes", "int4_bytes")
            )
        )
        without = replace(
            block, parameters=block.parameters - block.expert_parameters, matrices=others
        )
        ways = DType.BFLOAT16, quantisation
        assert sum(sizes) == block.weight_bytes(*ways) - without.weight_bytes(*ways)


def read_by_the_cache(room: float, tokens: int, skew: float) -> float:
    """Bytes a step of `tokens` tokens reads, with a cache that has room for this fraction of all
    experts; without a table.

    With `skew` some experts are chosen more often than others.
    """
    random = np.random.default_rng(5)
    sizes = np.full((LAYERS, EXPERTS), SIZE, np.int64)
    cache = ForecastCache(
        int(room * sizes.sum()), sizes, ExpertTable.even(LAYERS, EXPERTS), most_ahead=0
    )
    weights = (1.0 + np.arange(EXPERTS)) ** -skew
    odds = np.log(weights)
    steps = 600 // tokens + 100
    warm = 60
    for step in range(warm + steps):
        if step == warm:
            before = cache.counts.bytes_read
        for layer in range(LAYERS):
            # The largest of log weights with Gumbel noise: a draw without putting back.
            noisy = odds + random.gumbel(size=(tokens, EXPERTS))
            cache.choose(layer, np.argsort(-noisy, axis=1)[:, :CHOSEN].astype(np.int16))
    return (cache.counts.bytes_read - before) / steps


@pytest.mark.parametrize("room", [0.15, 0.4, 0.75])
@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.one_in(3)
def test_even_routing_reads_what_the_plan_expects_and_other_routing_less(
    room: float, tokens: int
) -> None:
    every = LAYERS * EXPERTS * SIZE
    one = Streaming(
        every,
        int((1 - room) * every),
        0,
        0,
        1e9,
        expert_bytes=every,
        mixtures=LAYERS,
        chosen_share=CHOSEN / EXPERTS,
    )
    expected = one.step_bytes(tokens)
    even, skewed = (read_by_the_cache(room, tokens, skew) for skew in (0.0, 1.2))
    assert 0.85 * expected <= even <= 1.03 * expected
    assert skewed <= (1.0 if tokens > 4 else 0.75) * expected


def test_a_prompt_of_one_mixture_needs_all_of_its_experts_once() -> None:
    one = Streaming(1000, 600, 0, 0, 1e9, expert_bytes=800, mixtures=1, chosen_share=0.25)
    assert one.step_bytes(1) == pytest.approx(0.25 * 800), "what one token needs is never more"
    assert one.step_bytes(STEP_TOKENS) == pytest.approx(800)
    assert replace(one, mixtures=40).step_bytes(STEP_TOKENS) == pytest.approx(600 * 40 / 39)
    layers = Streaming(1000, 600, 0, 0, 1e9)
    assert [layers.step_bytes(tokens) for tokens in (1, STEP_TOKENS)] == [600, 600], (
        "layers pass whole"
    )


def test_a_plan_caches_experts_and_says_what_that_costs() -> None:
    problem = mixture_problem(memory=120e6)
    result = plan(problem, alternatives=0)
    (stage,) = result.stages
    one = stage.streaming
    assert one is not None and one.caches and result.prediction is not None
    assert 0 < one.streamed_bytes < one.expert_bytes < one.weight_bytes
    decode_s = result.prediction.time_per_token_s
    read_s = one.step_bytes(1) / one.disk_bytes_per_s
    assert one.step_bytes(1) == pytest.approx(one.streamed_bytes * 2 / 8, rel=0.06), (
        "two of eight experts"
    )
    assert read_s < decode_s < read_s + 0.01
    daily = one.step_bytes(1) * result.prediction.throughput_tps * 86_400
    assert daily_bytes(stage, result.prediction) == pytest.approx(daily)
    words = describe_streaming(result)[0]
    assert (
        words.startswith("node holds ")
        and " MB of experts and reads the others from its disk at 0.1 GB/s: " in words
    )
    assert "0.0 of" not in words
    (cost,) = streaming_costs(Costs(problem), result)
    assert cost.step_s([(10, 1)]) == pytest.approx(decode_s, rel=0.05)
    many = cost.step_s([(10, 1)] * 8)
    assert many > 3 * cost.step_s([(10, 1)]), "eight tokens choose others than one"


@pytest.mark.parametrize(
    ("inner", "wanted"),
    [(256, ["nothing", "caches", "stays"]), (16, ["nothing", "passes", "caches", "stays"])],
)
def test_where_not_two_experts_fit_layers_pass_if_they_can(inner: int, wanted: list[str]) -> None:
    """Only bytes decide: with more and more memory the same node changes from one mode to the
    other."""
    seen = []
    for memory in np.linspace(60e6, 160e6, 101):
        result = plan(mixture_problem(memory, inner), alternatives=0)
        one = result.stages[0].streaming if result.stages else None
        mode = "stays" if one is None else "caches" if one.caches else "passes"
        seen.append("nothing" if result.prediction is None else mode)
        if mode == "passes" and one is not None:
            weights = [block.weight_bytes(DType.FLOAT32) for block in result.problem.model.blocks]
            kept = choose_residency(weights, one.weight_bytes - sum(weights), one.budget_bytes)
            assert kept.streamed_bytes == one.streamed_bytes
            words = describe_streaming(result)[0]
            assert re.match(
                r"node holds [\d.]+ of 24 MB and streams [\d.]+ from its disk at 0.1 GB/s", words
            ), words
    assert [
        mode for index, mode in enumerate(seen) if not index or seen[index - 1] != mode
    ] == wanted
