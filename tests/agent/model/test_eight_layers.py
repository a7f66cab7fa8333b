"""Models of eight layers, and sequences beyond two chunks of transformers' delta rules, in chunks,
packed and decoded.

The tables of test_equivalence.py have four layers and sequences of up to 21 tokens, for which
transformers' form for prompts takes one chunk of 64. Here an error of a state would add up over
more layers and more steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeshard.architectures import parse_config
from edgeshard.domain.models.model import LayerRange
from tests.agent.model.conftest import build
from tests.agent.model.families import LAYERS, VARIANTS, Variant, first_rows
from tests.agent.model.test_equivalence import disagreement
from tests.support.forms import in_turn

LENGTHS = (133, 67, 26, 24, 21, 16, 12, 9)
"""The first is longer than two chunks of 64, all but the last than one of 8, which Mamba2's rows
have."""
ENDS = ((8,), (3, 8), (1, 4, 8), (2, 3, 6, 8))
"""The ends of stages."""
DECODED = 6
STEPS = (
    [(0, 50)],
    [(0, 1), (1, 33)],
    [(0, 70), (1, 1), (2, 20)],
    [(1, 26), (3, 9), (4, 15), (5, 1)],
    [(0, 1), (1, 1), (3, 9), (5, 9), (6, 6), (7, 3)],
    [(0, 5)],
    *([[(request, 1) for request in range(8)]] * DECODED),
)
"""(request, tokens) of each step: chunks of prompts, some with other chunks and with single tokens;
then eight requests, a token of each at once."""


def deeper(variant: Variant) -> Variant:
    """The variant with twice as many layers: lists by layer are repeated."""
    options: dict[str, Any] = {
        key: value * 2 if isinstance(value, list) and len(value) == LAYERS else value
        for key, value in variant.options.items()
    }
    for layers, positions in (
        ("num_hidden_layers", "max_position_embeddings"),
        ("n_layer", "n_positions"),
    ):
        if layers in options:
            options |= {layers: 2 * LAYERS, positions: 256}
    return replace(variant, options=options)


def stages_of(ends: tuple[int, ...]) -> Iterator[LayerRange]:
    yield from (LayerRange(*pair) for pair in zip((0, *ends), ends, strict=False))


def test_the_steps_run_each_token_once() -> None:
    assert [sum(dict(step).get(request, 0) for step in STEPS) for request in range(8)] == list(
        LENGTHS
    )


@pytest.mark.parametrize("name", in_turn(8, first_rows()))
def test_eight_layers_give_the_unsplit_models_logits(
    name: str, tmp_path: Path, tiny_head: Any
) -> None:
    checkpoint = build(deeper(VARIANTS[name]), tmp_path, LENGTHS)
    assert parse_config(checkpoint.config).layer_count == 2 * LAYERS
    for ends in ENDS:
        head = tiny_head(
            [checkpoint.load(layers) for layers in stages_of(ends)], checkpoint.sequences
        )
        parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
        for spans in STEPS:
            for request, logits in head.step(spans).items():
                parts[request].append(logits)
        for own, reference in zip(parts, checkpoint.reference, strict=True):
            assert disagreement(torch.cat(own), reference, checkpoint.slack) == "", (
                f"stages that end at {ends}"
            )
