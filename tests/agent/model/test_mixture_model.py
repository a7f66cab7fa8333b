"""The shipped mixture of experts: it has learned to read, and the widths of its experts cost what
the tool reports."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from edgeshard_agent.ops.native import native_available

from bench.quantisation import VALIDATION
from bench.training.expert_runs import Mixture, token_ids
from edgeshard.architectures import EXPERT_WIDTHS
from edgeshard.domain.models.dtypes import Quantisation

MODEL = Path(__file__).resolve().parents[3] / "bench" / "mixture_model"
SCORED_BYTES = 8_000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def nats(mixture: Mixture) -> float:
    return mixture.nats_per_token(token_ids(MODEL, VALIDATION, SCORED_BYTES))


def test_the_model_has_learned_what_its_record_says() -> None:
    tokens = len(token_ids(MODEL, VALIDATION, SCORED_BYTES))
    found = nats(Mixture.load(MODEL, None)) * (tokens - 1) / SCORED_BYTES / math.log(2)
    record = json.loads((MODEL / "training.json").read_text())
    assert 1.0 < found < record["valid_bits_per_byte"], (
        f"{found:.3f}: the text's beginning is easier than all of it"
    )


@pytest.mark.long
@pytest.mark.skipif(not native_available(), reason="two bits are for native kernels")
def test_layers_that_the_curve_calls_dear_cost_more_in_two_bits_than_cheap_ones() -> None:
    """docs/experts.md: the first layer's experts cost 0.022 nats a token, the fourth's 0.001."""
    assert json.loads((MODEL / "config.json").read_text()).get(EXPERT_WIDTHS) is None
    plain, dear, cheap = (
        nats(Mixture.load(MODEL, Quantisation.INT4, **{EXPERT_WIDTHS: widths}))
        for widths in (
            None,
            ["2" * 16, *["4" * 16] * 7],
            [*["4" * 16] * 3, "2" * 16, *["4" * 16] * 4],
        )
    )
    assert 0.01 < dear - plain < 0.05
    assert abs(cheap - plain) < 0.005
