"""Whole models give the same logits and tokens on every kind of processor, bit for bit.

`make aarch64` runs these tests under emulation as well. Weights are made by NumPy, whose integers
are the same on every machine. The digests hold for all kernels but those that round otherwise
(docs/kernels.md, Numbers).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops import native

from edgeshard.architectures import expected_tensors
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.agent.model.test_bits import BLOCK_TOKENS, CONFIGS, LAYERS, VOCAB, advance, has_states
from tests.agent.ops.test_common_bits import OWN_BITS

PROMPT_TOKENS, NEW_TOKENS = 150, 24
WEIGHTS_UP_TO = 0.25
# A change of an operator changes these on purpose: take them from a failed test then, of any
# processor.
DIGESTS = {
    ("llama", "bfloat16"): "73646ec364498d69",
    ("llama", "int8"): "76e2d7fb1509e31c",
    ("gemma2", "bfloat16"): "470421e8f1287af5",
    ("gemma2", "int4"): "6567b6200f5179b7",
    ("qwen3_5", "bfloat16"): "f966c930a8547649",
    ("qwen3_5", "int8"): "f49c282ea192bff4",
    ("qwen3_moe", "bfloat16"): "1b39327633c0a026",
    ("qwen3_moe", "int4"): "38bd15f3a9d9100a",
}

pytestmark = [
    pytest.mark.skipif(not native.native_available(), reason="torch's operators do not promise it"),
    pytest.mark.skipif(
        native.native_available() and native.kernel_names()[0] in OWN_BITS,
        reason="these kernels round otherwise",
    ),
]


class IntegerWeights:
    """A model's tensors of random integers times a power of two, by their names in a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        generator = np.random.default_rng(11)
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in expected_tensors(config).items():
            values = torch.from_numpy(generator.integers(-64, 65, tensor.shape)) * (
                WEIGHTS_UP_TO / 64
            )
            if len(tensor.shape) == 1:
                values += 1
            self._tensors[name if name == "lm_head.weight" else f"model.{name}"] = values.bfloat16()

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def model(name: str, scheme: str) -> StageModel:
    quantisation = Quantisation(scheme) if scheme.startswith("int") else None
    config = CONFIGS[name]
    source = IntegerWeights(config)
    layers = LayerRange(0, LAYERS)
    weights = StageWeights.load(
        source, config, layers, dtype=DType.BFLOAT16, device="cpu", quantisation=quantisation
    )
    blocks = -(-(PROMPT_TOKENS + NEW_TOKENS) // BLOCK_TOKENS)
    return StageModel.with_kv(
        weights, KvMemory(KvFormat(DType.BFLOAT16), blocks, BLOCK_TOKENS, slots=1)
    )


def generate(stage: StageModel) -> tuple[list[int], str]:
    """The likeliest tokens after a prompt, and a digest of the logits that they come from."""
    prompt = np.random.default_rng(3).integers(0, VOCAB, PROMPT_TOKENS)
    blocks = tuple(range(-(-(PROMPT_TOKENS + NEW_TOKENS) // BLOCK_TOKENS)))
    digest = hashlib.sha256()
    tokens: list[int] = []
    new, begin = prompt, 0
    while len(tokens) < NEW_TOKENS:
        grant = KvGrant(0, 0, blocks, slot=0 if has_states([stage]) else None)
        span = Span(0, begin, len(new), sampling=Sampling())
        logits = advance(
            [stage], StepPlan(grants=(grant,) if begin == 0 else (), spans=(span,)), new
        )[-1].float()
        digest.update(logits.numpy().tobytes())
        tokens.append(int(logits.argmax()))
        begin += len(new)
        new = np.array(tokens[-1:])
    return tokens, digest.hexdigest()[:16]


@pytest.mark.parametrize(("name", "scheme"), DIGESTS)
def test_logits_of_a_whole_model_have_the_same_bits_on_every_processor(
    name: str, scheme: str
) -> None:
    tokens, digest = generate(model(name, scheme))
    assert len(set(tokens)) > 2, "one token again and again tells little"
    assert digest == DIGESTS[name, scheme]
