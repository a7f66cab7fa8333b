"""When a pipeline's micro-batches may begin their next tokens."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """When a micro-batch may begin its next token."""

    SEQUENTIAL = "sequential"
    """One micro-batch at a time, from its prompt to its last token."""
    BUBBLES = "bubbles"
    """Once every micro-batch of the iteration is back."""
    NO_BUBBLES = "no-bubbles"
    """The moment its own token is back."""
