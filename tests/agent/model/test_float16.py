"""float16 with small integers as weights gives the results of float32: the kernels take no rows of
float16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.projection import Integers, Projection
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

import bench.random_llama as random_llama
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

LAYERS, TOKENS = 2, 24
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
}


def logits_of(dtype: DType, quantisation: Quantisation, tied: bool) -> torch.Tensor:
    """Return the logits [TOKENS, vocabulary] of one prompt, in float32."""
    config = {**random_llama.CONFIG, **SIZES, "tie_word_embeddings": tied}
    source = random_llama.RandomWeights(config)
    layers = LayerRange(0, LAYERS)
    weights = StageWeights.load(
        source, config, layers, dtype=dtype, device="cpu", quantisation=quantisation
    )
    stage = StageModel.with_kv(weights, KvMemory(dtype, 4, 16))
    span = Span(0, 0, TOKENS, sample=True, sampling=Sampling())
    plan = StepPlan(grants=(KvGrant(0, 0, (0, 1)),), spans=(span,))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], TOKENS)
    return stage.logits(plan, tokens).float().clone()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "quantisation", [Quantisation.INT8, Quantisation.INT4, Quantisation.INT4_HEAD_WHOLE]
)
def test_integers_run_in_float16(quantisation: Quantisation, tied: bool) -> None:
    expected = logits_of(DType.FLOAT32, quantisation, tied)
    found = logits_of(DType.FLOAT16, quantisation, tied)
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_a_projection_of_integers_keeps_the_dtype_of_its_rows() -> None:
    torch.manual_seed(0)
    projection = Projection((32,), 64, integers=Integers(IntegerFormat.INT8, 64))
    projection.fill("weight", 0, torch.randn(32, 64), torch.float16, "cpu")
    rows = torch.randn(3, 64).half()
    found = projection(rows)
    assert found.dtype is torch.float16
    assert torch.equal(found, projection(rows.float()).half())
