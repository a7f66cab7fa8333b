"""Weights kept as small integers: the planner counts the bytes that a node will hold and read, and
no others."""

from __future__ import annotations

from typing import Any

import pytest

from edgeshard.architectures import EXPERT_WIDTHS, expected_tensors, held_bytes
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import ROUNDED, DType, Quantisation
from edgeshard.domain.models.model import LayerRange, TensorInfo
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.devices import parse_cluster
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS, model_from_config
from edgeshard.planning.search.plan import plan
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stage_bytes

LLAMA = BUILT_IN_CONFIGS["llama2-7b"]
# Rows of 100 elements fill no whole number of groups.
ODD = LLAMA | {
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
TIED = LLAMA | {"tie_word_embeddings": True}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
WIDTHS = MIXTRAL | {EXPERT_WIDTHS: ["24824448", "22222222", "", *(["44444442"] * 29)]}


def problem(
    config: dict[str, Any], quantisation: Quantisation | None, memory: float = 64e9
) -> PlanProblem:
    figures = {"memory_bytes": memory, "bandwidth_bytes_per_s": 20e9, "flops": 1e15}
    cluster = parse_cluster(
        {
            "source": "node-1",
            "device": [{"name": "node", "count": 3, **figures}],
            "link": [{"bandwidth_bps": 1e10}],
        }
    )
    made = PlanProblem(model_from_config("model", config), cluster, quantisation=quantisation)
    made.check()
    return made


@pytest.mark.parametrize("quantisation", [None, *ROUNDED], ids=str)
@pytest.mark.parametrize(
    "config", [LLAMA, ODD, TIED, MIXTRAL, WIDTHS], ids=["llama", "odd", "tied", "mixtral", "wide"]
)
@pytest.mark.parametrize("ends", [(7, 20, 32), (32,)], ids=["three", "one"])
def test_the_memory_of_a_plan_is_what_a_stage_will_hold(
    config: dict[str, Any], quantisation: Quantisation | None, ends: tuple[int, ...]
) -> None:
    costs = Costs(problem(config, quantisation))
    firsts = (0, *ends[:-1])
    cut = Cut(tuple(range(len(ends))), ends)
    for index, (use, first, end) in enumerate(
        zip(costs.memory(Load(), cut), firsts, ends, strict=True)
    ):
        layers = LayerRange(first, end)
        wanted = expected_tensors(config, layers).values()
        tensors = [
            TensorInfo(item.name, DType.BFLOAT16, item.shape, Digest("0" * 64)) for item in wanted
        ]
        assert use.weights == held_bytes(config, tensors, layers, DType.BFLOAT16, quantisation), (
            index
        )
    needed = stage_bytes(costs.decode(Load()), cut)
    uses = [use.weights + use.kv + use.workspace for use in costs.memory(Load(), cut)]
    assert needed == pytest.approx(uses), "solvers see the same bytes"


def time_per_token_s(config: dict[str, Any], quantisation: Quantisation | None) -> float:
    found = plan(problem(config, quantisation)).prediction
    assert found is not None
    return found.time_per_token_s


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["untied", "tied"])
def test_fewer_bytes_are_read_sooner(config: dict[str, Any]) -> None:
    whole = time_per_token_s(config, None)
    # 8 bits, plus 16 for each 64 numbers, compared with 16; for 4 bits, 16 for each 32. Some of the
    # time is for KV.
    assert whole / time_per_token_s(config, Quantisation.INT8) == pytest.approx(16 / 8.25, rel=0.02)
    assert whole / time_per_token_s(config, Quantisation.INT4_HEAD_INT4) == pytest.approx(
        16 / 4.5, rel=0.04
    )


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["untied", "tied"])
def test_the_head_is_read_as_it_is_kept(config: dict[str, Any]) -> None:
    heads = (Quantisation.INT4_HEAD_WHOLE, Quantisation.INT4, Quantisation.INT4_HEAD_INT4)
    whole, int8, int4 = (time_per_token_s(config, quantisation) for quantisation in heads)
    elements = 32_000 * 4096
    assert (whole - int8) * 20e9 == pytest.approx(elements * (2 - 8.25 / 8), rel=0.01)
    assert (int8 - int4) * 20e9 == pytest.approx(elements * (8.25 - 4.5) / 8, rel=0.01)


def test_a_tied_head_of_integers_is_a_matrix_beside_the_embedding() -> None:
    model, dtype = model_from_config("model", TIED), DType.BFLOAT16
    elements = 32_000 * 4096
    for quantisation, shared in (
        (None, 2 * elements),
        (Quantisation.INT8_HEAD_WHOLE, 2 * elements),
    ):
        assert model.shared_bytes(dtype, quantisation) == shared
    for quantisation in (Quantisation.INT8, Quantisation.INT4, Quantisation.INT4_HEAD_INT4):
        assert model.shared_bytes(dtype, quantisation) == 0


def test_what_does_not_fit_whole_may_fit_quantised() -> None:
    assert plan(problem(LLAMA, None, memory=3e9)).prediction is None
    assert plan(problem(LLAMA, Quantisation.INT8, memory=3e9)).prediction is not None


def test_a_model_that_runs_with_whole_weights_only_is_refused() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 96,
        "n_positions": 512,
    }
    with pytest.raises(UnsupportedModelError) as refused:
        problem(config, Quantisation.INT8)
    assert refused.value.field == "quantisation"
