"""Memory of a stage besides weights and KV, as the planner's constraint and the placer's check both
count it. Pure."""

from __future__ import annotations

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.step import MAX_STEP_TOKENS, STEP_TOKENS
from edgeshard.planning.inputs.shapes import ModelSpec

SLACK_BYTES = 64 << 20
"""Buffers and the allocator's slack of a stage, whatever the model."""


def largest_step_tokens(max_context: int) -> int:
    """Tokens of the largest step a head forms: chunks of several prompts to its budget, or a slice
    of a long one."""
    return min(MAX_STEP_TOKENS, max(STEP_TOKENS, max_context))


def workspace_bytes(model: ModelSpec, dtype: DType, step_tokens: int, micro_batches: int) -> int:
    """Bytes besides weights, KV and logits of a stage whose largest step has `step_tokens` tokens.

    SLACK_BYTES + step_tokens * (4 * hidden + 3 * inner) * itemsize + 2 * micro_batches *
    step_tokens * width * itemsize

    A block has at most seven rows for each token. Four are of hidden states: its input, the normed
    input, queries, attention's output. Three are of the MLP's inner size: gate, up and their
    product. The frames of `micro_batches` steps, `width` numbers for each token, are kept for
    resending; as many may have arrived.
    """
    activations = step_tokens * (4 * model.shape.hidden_size + 3 * model.inner_size)
    frames = 2 * micro_batches * step_tokens * model.shape.frame_width
    return SLACK_BYTES + (activations + frames) * dtype.itemsize


def logits_bytes(model: ModelSpec, dtype: DType, rows: int) -> int:
    """Logits of `rows` positions in the model's dtype and once more in fp32, on the stage with the
    head."""
    return rows * model.shape.vocab_size * (dtype.itemsize + 4)
