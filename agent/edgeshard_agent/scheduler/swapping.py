"""Whether a request's KV is kept aside when its memory is taken, or computed again. Pure.

vLLM has both ways; which one is faster depends on the length and on what the stages cost.
(docs/papers/agent.md#kv-memory-in-pages)
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard_agent.scheduler.chunking import ComputeSeconds

MEMORY_BPS = 2e9
"""Bytes a second at which a node is taken to copy blocks within its memory: no node measures
that."""
DISK_BPS = 2e8
"""The same for a disk that was not measured, reading as well as writing."""


@dataclass(frozen=True, slots=True)
class Swapping:
    """The KV that the stages can keep aside: `blocks` each; `block_s` seconds go into copying one,
    both ways together.

    `compute_s` is what pieces of a step take on all stages; None if unknown; then keeping is
    assumed to be faster.
    """

    blocks: int = 0
    block_s: float = 0.0
    compute_s: ComputeSeconds | None = None

    def is_faster(self, blocks: int, positions: int, step_tokens: int) -> bool:
        """Whether keeping blocks is faster than running these positions once more, in steps of
        `step_tokens` tokens."""
        if self.compute_s is None:
            return True
        again_s = sum(
            self.compute_s([(first, min(step_tokens, positions - first))])
            for first in range(0, positions, step_tokens)
        )
        return blocks * self.block_s < again_s


class SwappedOut:
    """The requests whose KV the stages keep aside, by number, and the blocks it takes there."""

    def __init__(self, swapping: Swapping, step_tokens: int) -> None:
        self._swapping = swapping
        self._step_tokens = step_tokens
        self._blocks: dict[int, int] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._blocks

    @property
    def used(self) -> int:
        return sum(self._blocks.values())

    def takes(self, blocks: int, positions: int) -> bool:
        """Whether to keep the KV of a request with these blocks and positions."""
        if not blocks or self.used + blocks > self._swapping.blocks:
            return False
        return self._swapping.is_faster(blocks, positions, self._step_tokens)

    def add(self, request: int, blocks: int) -> None:
        self._blocks[request] = blocks

    def remove(self, request: int) -> bool:
        """Whether it was here."""
        return self._blocks.pop(request, None) is not None
