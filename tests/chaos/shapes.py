"""The models of the cases' shapes: random, with all options that affect a node's stored data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeshard.architectures.record import Fused
from tests.agent.model.families import decoder_of
from tests.chaos.matrix import VOCABULARY, Shape
from tests.support.hybrids import save_random

LOGPROB_SLACK = 1e-5
"""Tolerance if equal bits are not promised. After a loss the earlier tokens are run again as a
prompt. Torch sums a matrix of several rows in another order than one of a single row: up to 1e-6
over all cases. Slots that are not zeroed make it 1.5e-2."""

_ROWS: dict[Shape, tuple[str, dict[str, Any]]] = {
    Shape.HYBRID: ("qwen3_5-text", {}),
    Shape.NEMOTRON: (
        "nemotron_h-groups",
        {
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "moe",
                "full_attention",
                "moe",
                "linear_attention",
            ]
        },
    ),
    # as the kernels take them
    Shape.GEMMA4: (
        "gemma4-dense",
        {"head_dim": 16, "global_head_dim": 32},
    ),
}
"""A row of tests/agent/model/families.py, and the changes to it."""
_LAYERS = {
    Shape.HYBRID: "a=0:2,b=2:3,c=3:4",
    Shape.NEMOTRON: "a=0:1,b=1:3,c=3:6",  # b keeps nothing of any request
    Shape.GEMMA4: "a=0:2,b=2:3,c=3:4",
}


def save(shape: Shape, directory: Path) -> None:
    """Write the checkpoint."""
    row, changes = _ROWS[shape]
    save_random(directory, row, vocab_size=VOCABULARY[1], max_position_embeddings=256, **changes)


def layers_of(shape: Shape) -> str:
    """The layers of three stages, as a deployment's spec has them."""
    return _LAYERS[shape]


def slack_of(shape: Shape) -> float:
    """The allowed difference of log-probabilities: 0 for families in our own blocks, whose bits are
    promised (docs/kernels.md)."""
    row, _ = _ROWS[shape]
    return 0.0 if isinstance(decoder_of(row).architecture.runs, Fused) else LOGPROB_SLACK
