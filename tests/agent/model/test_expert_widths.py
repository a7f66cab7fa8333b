"""Experts with widths of their own: each is packed as the model states, and the other weights are
the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.blocks import Block, GatedMlp, MixtureMlp
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from edgeshard.architectures import EXPERT_WIDTHS, held_bytes, parse_config
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, TensorInfo
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.agent.model.test_bits import CONFIGS, LAYERS, VOCAB, RandomWeights

TOKENS = np.random.default_rng(4).integers(0, VOCAB, 40)
PLAIN = CONFIGS["qwen3_moe"]
ALL = LayerRange(0, LAYERS)
MIXED = ["24824448", "22222222", "88888888", "44444442"]


def config_of(widths: list[str] | None) -> dict[str, Any]:
    return PLAIN if widths is None else PLAIN | {EXPERT_WIDTHS: widths}


def logits(widths: list[str] | None, quantisation: Quantisation | None) -> torch.Tensor:
    stage = StageModel.with_kv(
        StageWeights.load(
            RandomWeights(PLAIN),
            config_of(widths),
            ALL,
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=quantisation,
        ),
        KvMemory(DType.BFLOAT16, 8, 16),
    )
    plan = StepPlan(
        grants=(KvGrant(0, 0, (0, 1, 2)),), spans=(Span(0, 0, len(TOKENS), sampling=Sampling()),)
    )
    return stage.logits(plan, TOKENS)


def load(widths: list[str] | None) -> StageWeights:
    return StageWeights.load(
        RandomWeights(PLAIN),
        config_of(widths),
        ALL,
        dtype=DType.BFLOAT16,
        device="cpu",
        quantisation=Quantisation.INT8,
    )


def blocks(weights: StageWeights) -> list[Block]:
    return [module for module in weights.modules.modules() if isinstance(module, Block)]


def test_each_expert_has_its_width_and_the_rest_that_of_the_node() -> None:
    for layer, block in enumerate(blocks(load(MIXED))):
        assert isinstance(block.mlp, MixtureMlp)
        for expert, mlp in enumerate(block.mlp.experts):
            assert isinstance(mlp, GatedMlp)
            for projection in (mlp.gate_up, mlp.down):
                assert projection.packed is not None
                assert projection.packed.scheme == f"int{MIXED[layer][expert]}"
        assert block.qkv.packed is not None and block.qkv.packed.scheme == "int8"


@pytest.mark.parametrize("widths", [None, MIXED, ["2" * 8] * LAYERS])
def test_bytes_held_are_those_that_were_counted(widths: list[str] | None) -> None:
    source = RandomWeights(PLAIN)
    tensors = [
        TensorInfo(name, DType.BFLOAT16, tuple(source.read(name).shape), Digest("0" * 64))
        for name in source.names()
    ]
    counted = held_bytes(config_of(widths), tensors, ALL, DType.BFLOAT16, Quantisation.INT8)
    assert load(widths).modules.parameter_bytes == counted


def test_widths_that_are_the_node_s_own_change_nothing() -> None:
    assert torch.equal(
        logits(["8" * 8] * LAYERS, Quantisation.INT8), logits(None, Quantisation.INT8)
    )
    assert torch.equal(logits([""] * LAYERS, Quantisation.INT4), logits(None, Quantisation.INT4))
    assert not torch.equal(logits(MIXED, Quantisation.INT8), logits(None, Quantisation.INT8))


def test_whole_weights_ignore_widths() -> None:
    assert torch.equal(logits(MIXED, None), logits(None, None))


def test_widths_are_read_from_the_config() -> None:
    widths = parse_config(config_of(MIXED)).expert_widths
    assert widths is not None
    assert [widths.of(0, expert) for expert in range(3)] == [
        IntegerFormat.INT2,
        IntegerFormat.INT4,
        IntegerFormat.INT8,
    ]


@pytest.mark.parametrize(
    "widths",
    [
        "2444",
        ["2" * 8],
        ["2" * 7, *MIXED[1:]],
        ["24824443", *MIXED[1:]],
        [2, *MIXED[1:]],
        {},
        [None] * 4,
    ],
)
def test_widths_that_do_not_fit_are_refused(widths: Any) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        parse_config(PLAIN | {EXPERT_WIDTHS: widths})
    assert raised.value.field == EXPERT_WIDTHS


def test_models_without_experts_have_no_widths() -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        parse_config(CONFIGS["llama"] | {EXPERT_WIDTHS: [""] * LAYERS})
    assert raised.value.field == EXPERT_WIDTHS
