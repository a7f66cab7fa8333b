"""The head's memory of how to slice a prompt."""

from __future__ import annotations

import pytest
from edgeshard_agent.scheduler.slices import PromptSlices

from edgeshard.domain.deployments.step_cost import StageCost

STAGE = StageCost((1, 2048), (0.01, 0.02), (0.01, 2.057), 0.0, 1e-6, 0.001, 0.0, 1e-5)


@pytest.mark.parametrize("tokens", [1, 64, 130, 1000, 1536, 1537, 4096, 30_000])
def test_slices_sum_to_the_prompt(tokens: int) -> None:
    slices = PromptSlices((STAGE, STAGE))
    assert slices(tokens) == (tokens,), "not prepared"
    slices.prepare(tokens)
    assert sum(slices(tokens)) == tokens and min(slices(tokens)) > 0


@pytest.mark.parametrize("tokens", [1920, 1921, 1983, 1984, 1985, 2047])
def test_the_last_slice_is_not_longer_by_more_than_half_a_unit(tokens: int) -> None:
    """A last slice of nearly two units would delay the first token: nothing of it overlaps with
    other slices."""
    slices = PromptSlices((STAGE, STAGE))
    slices.prepare(2048)
    usual = slices(2048)[-1]
    slices.prepare(tokens)
    assert usual - 64 <= slices(tokens)[-1] <= usual + 64


def test_prompts_of_nearly_one_length_share_a_search() -> None:
    slices = PromptSlices((STAGE, STAGE))
    slices.prepare(1300)
    assert len(slices(1310)) == len(slices(1300)) > 1
    assert sum(slices(1310)) == 1310


def test_few_lengths_are_kept() -> None:
    slices = PromptSlices((STAGE,))
    for tokens in range(64, 64 * 400, 64):
        slices.prepare(tokens)
    assert slices(64 * 3) == (192,) and len(slices._known) <= 256
