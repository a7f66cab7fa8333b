"""Stages of real hybrids. A request that begins from saved states has the same bits as the request
that saved them. A request that continues after a guess has the same bits as one without guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.ops.native import native_available

from edgeshard.architectures.record import Fused
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StateCopy, StepPlan
from tests.agent.model.families import VARIANTS, decoder_of

HYBRIDS = [name for name in VARIANTS if decoder_of(name).shape.states]
BLOCK = 16
SHARED, END = 2 * BLOCK, 45
FIRST = Sampling()


def logits(stages: list[StageModel], plan: StepPlan, ids: np.ndarray) -> torch.Tensor:
    hidden = stages[0].execute(plan, ids).hidden
    return stages[1].logits(plan, hidden)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.one_in(3)
def test_a_restored_request_has_the_bits_of_the_one_that_was_saved(
    name: str, dtype: DType, checkpoint_of: Callable[[str], Any]
) -> None:
    checkpoint = checkpoint_of(name)
    stages = [checkpoint.load(layers, dtype) for layers in (LayerRange(0, 2), LayerRange(2, 4))]
    ids = np.random.default_rng(4).integers(0, decoder_of(name).shape.vocab_size, END)
    begins = (
        KvGrant(1, 0, (7, 3, 5), slot=1),
        KvGrant(2, 0, (7, 3), filled=SHARED, slot=2),
        KvGrant(2, 2, (9,)),
    )
    first = StepPlan(grants=begins[:1], spans=(Span(1, 0, SHARED, sampling=FIRST),))
    logits(stages, first, ids[:SHARED])
    found: list[torch.Tensor] = []
    for position in range(SHARED, END):
        saves = (StateCopy(1, SHARED, 4),) if position == SHARED else ()
        found.append(
            logits(
                stages,
                StepPlan(spans=(Span(1, position, 1),), saves=saves),
                ids[position : position + 1],
            )
        )
    for position in range(SHARED, END):
        is_first = position == SHARED
        plan = StepPlan(
            frees=(1,) if is_first else (),
            grants=begins[1:] if is_first else (),
            spans=(Span(2, position, 1, sampling=FIRST if is_first else None),),
            restores=(StateCopy(2, SHARED, 4),) if is_first else (),
        )
        again = logits(stages, plan, ids[position : position + 1])
        assert torch.equal(again, found[position - SHARED]), position


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.one_in(3)
def test_a_request_goes_on_behind_any_of_its_guesses(
    name: str, dtype: DType, checkpoint_of: Callable[[str], Any]
) -> None:
    """Right guesses, wrong ones after them, and none, next to a request without guesses."""
    checkpoint = checkpoint_of(name)
    decoder = decoder_of(name)
    stages = [
        checkpoint.load(layers, dtype, guess_slots=4)
        for layers in (LayerRange(0, 2), LayerRange(2, 4))
    ]
    ids = np.random.default_rng(5).integers(0, decoder.shape.vocab_size, END)
    first = [Span(request, 0, BLOCK, sampling=FIRST) for request in (1, 2)]
    grants = KvGrant(1, 0, (7, 3, 5), slot=1), KvGrant(2, 0, (0, 1, 2), slot=3)
    logits(stages, StepPlan(grants=grants, spans=tuple(first)), np.concatenate([ids[:BLOCK]] * 2))
    at = BLOCK
    for guesses, right in ((4, 4), (3, 1), (0, 0), (2, 0), (4, 3), (1, 1), (3, 2)):
        wrong = (ids[at + 1 + right : at + 1 + guesses] + 1) % decoder.shape.vocab_size
        rows = np.concatenate([ids[at : at + 1 + right], wrong])
        found = logits(
            stages, StepPlan(spans=(Span(1, at, len(rows), sample=True, guesses=guesses),)), rows
        )
        for row in range(1 + right):
            plan = StepPlan(spans=(Span(2, at + row, 1),))
            alone = logits(stages, plan, ids[at + row : at + row + 1])
            if isinstance(decoder.architecture.runs, Fused) and native_available():
                assert torch.equal(found[row : row + 1], alone), (at, row)
            else:  # torch sums the products of several rows in another order
                tolerance = 1e-3 if dtype is DType.FLOAT32 else 0.1
                torch.testing.assert_close(
                    found[row : row + 1], alone, rtol=tolerance, atol=tolerance
                )
        at += 1 + right
