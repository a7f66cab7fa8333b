"""Weights that are in memory already serve another stage: the same bits, and nothing of them is
read again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.agent.model.test_bits import CONFIGS, LAYERS, VOCAB, RandomWeights, has_states

TOKENS = np.random.default_rng(4).integers(0, VOCAB, 40)


class CountedWeights(RandomWeights):
    def __init__(self, name: str) -> None:
        super().__init__(CONFIGS[name])
        self.reads: list[str] = []

    def names(self) -> Collection[str]:
        return super().names()

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return super().read(name)


def load_weights(
    source: CountedWeights, name: str, layers: LayerRange, scheme: str, *reuse: StageWeights
) -> StageWeights:
    quantisation = Quantisation(scheme) if scheme.startswith("int") else None
    dtype = DType.BFLOAT16 if quantisation else DType(scheme)
    return StageWeights.load(
        source,
        CONFIGS[name],
        layers,
        dtype=dtype,
        device="cpu",
        quantisation=quantisation,
        reuse=reuse,
    )


def load_stage(
    source: CountedWeights, name: str, layers: LayerRange, scheme: str, *reuse: StageWeights
) -> StageModel:
    quantisation = Quantisation(scheme) if scheme.startswith("int") else None
    dtype = DType.BFLOAT16 if quantisation else DType(scheme)
    return StageModel.with_kv(
        StageWeights.load(
            source,
            CONFIGS[name],
            layers,
            dtype=dtype,
            device="cpu",
            quantisation=quantisation,
            reuse=reuse,
        ),
        KvMemory(dtype, 8, 16, slots=8),
    )


def logits(stages: list[StageModel]) -> torch.Tensor:
    slot = 0 if has_states(stages) else None
    plan = StepPlan(
        grants=(KvGrant(0, 0, (0, 1, 2), slot=slot),),
        spans=(Span(0, 0, len(TOKENS), sampling=Sampling()),),
    )
    value: Any = TOKENS
    for stage in stages[:-1]:
        value = stage.execute(plan, value).hidden
    found = stages[-1].logits(plan, value)
    for stage in stages:
        stage.reset()
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", ["float32", "int4"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_stage_of_weights_that_are_there_gives_the_same_bits(name: str, scheme: str) -> None:
    source = CountedWeights(name)
    cuts = [LayerRange(0, 2), LayerRange(2, LAYERS)]
    wanted = logits([load_stage(source, name, layers, scheme) for layers in cuts])
    kept = load_weights(source, name, LayerRange(0, LAYERS), scheme)
    source.reads.clear()
    taken = [load_stage(source, name, layers, scheme, kept) for layers in cuts]
    assert not [read for read in source.reads if ".layers." in read]
    assert torch.equal(logits(taken), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_stage_that_grows_reads_only_what_it_lacks(name: str) -> None:
    source = CountedWeights(name)
    wanted = logits([load_stage(source, name, LayerRange(0, LAYERS), "bfloat16")])
    former = load_stage(source, name, LayerRange(0, 2), "bfloat16")
    source.reads.clear()
    kept = former.retire()
    kept.keep(LayerRange(0, LAYERS))
    grown = load_stage(source, name, LayerRange(0, LAYERS), "bfloat16", kept)
    assert {read.split(".")[2] for read in source.reads if ".layers." in read} == {"2", "3"}
    assert torch.equal(logits([grown]), wanted)


def test_what_a_stage_loses_goes_back_to_the_system() -> None:
    source = CountedWeights("llama")
    kept = load_stage(source, "llama", LayerRange(0, LAYERS), "float32").retire()
    whole = kept.parameter_bytes
    kept.keep(LayerRange(1, 3))
    assert kept.shareable(LayerRange(0, LAYERS)) == {1, 2}
    assert kept.parameter_bytes < whole


def test_weights_kept_in_another_way_are_not_shared() -> None:
    source = CountedWeights("llama")
    kept = load_weights(source, "llama", LayerRange(0, LAYERS), "float32")
    source.reads.clear()
    load_stage(source, "llama", LayerRange(0, 2), "bfloat16", kept)
    assert [read for read in source.reads if ".layers." in read]
