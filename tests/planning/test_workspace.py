"""The memory of a stage besides weights and KV follows the model and the largest step."""

from __future__ import annotations

from typing import Any

import pytest

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.inputs.shapes import ModelSpec, built_in_model
from edgeshard.planning.inputs.workspace import (
    SLACK_BYTES,
    largest_step_tokens,
    logits_bytes,
    workspace_bytes,
)


def built_in(name: str) -> ModelSpec:
    model = built_in_model(name)
    assert model is not None
    return model


LLAMA = built_in("llama2-7b")
WORKLOAD: dict[str, Any] = {
    "model": LLAMA,
    "dtype": DType.BFLOAT16,
    "step_tokens": 2048,
    "micro_batches": 0,
}


def test_a_long_slice_of_a_7b_model_needs_about_200_mb_of_activations() -> None:
    """2,048 rows of 4 x 4,096 and 3 x 11,008 numbers, two bytes each."""
    activations = workspace_bytes(**WORKLOAD) - SLACK_BYTES
    assert activations == 2048 * (4 * 4096 + 3 * 11_008) * 2
    assert 190e6 < activations < 210e6


def test_frames_are_there_for_every_micro_batch_sent_and_received() -> None:
    one, two = (workspace_bytes(**{**WORKLOAD, "micro_batches": count}) for count in (1, 2))
    assert two - one == one - workspace_bytes(**WORKLOAD) == 2 * 2048 * 4096 * 2


@pytest.mark.parametrize("name", ["llama2-13b", "llama2-70b"])
def test_a_wider_model_or_dtype_needs_more(name: str) -> None:
    model = built_in(name)
    assert workspace_bytes(**{**WORKLOAD, "model": model}) > workspace_bytes(**WORKLOAD)
    assert workspace_bytes(**{**WORKLOAD, "dtype": DType.FLOAT32}) > workspace_bytes(**WORKLOAD)


def test_the_largest_step_is_a_budget_of_chunks_or_a_slice_as_long_as_the_context_allows() -> None:
    assert [largest_step_tokens(context) for context in (16, 512, 1000, 2048, 4096)] == [
        512,
        512,
        1000,
        2048,
        2048,
    ]


def test_logits_are_held_in_the_models_dtype_and_in_fp32() -> None:
    assert logits_bytes(LLAMA, DType.BFLOAT16, 8) == 8 * 32_000 * (2 + 4)
