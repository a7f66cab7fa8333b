"""The chunk of a prompt that goes into a step: within the token budget, the link's bytes and the
latency promised. Pure.

Sarathi: a step takes its decodes first and fills up with a chunk of a prompt. FastGen: short
prompts are composed until the budget is full. HPipe: a prompt that no other request waits for is
cut into the slices that its planner chose. (docs/papers/agent.md#batching-step-by-step)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from edgeshard.domain.deployments.step_cost import InterTokenSeconds, Piece
from edgeshard.domain.errors import InvalidArgumentError

Slices = Callable[[int], Sequence[int]]
"""Tokens of a prompt -> lengths of the slices to cut it into, in order, which sum to it. Must
answer at once."""

ComputeSeconds = Callable[[Sequence[Piece]], float]
"""Pieces of a step -> seconds in which all stages together compute it."""

# The largest factor by which steps are assumed slower than their cost, and the part of it forgotten
# with every step.
MOST_SLOWER = 4.0
FORGOTTEN = 0.05


@dataclass(frozen=True, slots=True)
class Chunking:
    """The bounds of a step.

    * `step_tokens`: tokens of a step, decodes included. A chunk of a prompt gets the tokens that
      the decodes leave.
    * `slices`: for prompts that no other request waits for. A slice may exceed `step_tokens`, up to
      `max_step_tokens`, the limit of the stages.
    * `least_tokens`: no limit makes the first chunk of a step smaller. So prompts make progress
      under any promise and any number of decodes.
    * `inter_token_s`: the cost of a step. With it, chunks keep within `max_inter_token_latency_s`
      while any request decodes.
    * `compute_s`: the part of that cost which stages report of each step. If they take longer,
      chunks get smaller.
    """

    step_tokens: int
    max_step_tokens: int = 0
    least_tokens: int = 16
    max_inter_token_latency_s: float | None = None
    inter_token_s: InterTokenSeconds | None = None
    slices: Slices | None = None
    compute_s: ComputeSeconds | None = None

    def __post_init__(self) -> None:
        for name in ("step_tokens", "least_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; it must be 1 or more", field=name
                )


class ChunkSizer:
    """Sizes the chunks of the steps of one pipeline, which has at most `window` in flight."""

    def __init__(self, chunking: Chunking, window: int) -> None:
        self._chunking = chunking
        self._window = window
        self._before = 0
        self._expected_s: deque[float] = deque()
        self._slower = 1.0

    def formed(self, pieces: Sequence[Piece], prompt_tokens: int) -> None:
        """A step was formed of these pieces, with `prompt_tokens` tokens of prompts."""
        self._before = prompt_tokens
        cost = self._chunking.compute_s
        is_promised = self._chunking.max_inter_token_latency_s is not None
        self._expected_s.append(
            cost(pieces) if cost is not None and is_promised and prompt_tokens else 0.0
        )

    def returned(self, computed_s: float) -> None:
        """The oldest step has returned; its stages computed for `computed_s`.

        A node is slower than its profile when another process uses the same memory or its clock
        goes down. One slow step breaks a promise, so a longer time counts at once and a shorter one
        gradually.
        """
        expected_s = self._expected_s.popleft()
        if expected_s > 0 and computed_s > 0:
            slowdown = min(MOST_SLOWER, max(1.0, computed_s / expected_s))
            self._slower = max(slowdown, self._slower + FORGOTTEN * (slowdown - self._slower))

    def length(
        self, pieces: Sequence[Piece], decodes: int, first: int, end: int, decoding: bool
    ) -> int:
        """Tokens of the next chunk of the positions [first, end) of a prompt that ends there; 0
        when none fits.

        `pieces` are what the step has already, the first `decodes` of them decodes; `decoding` is
        whether any request waits for a token meanwhile.
        """
        chunking = self._chunking
        slices = () if chunking.slices is None or decoding else chunking.slices(end)
        stop, budget = end, chunking.step_tokens
        if len(slices) > 1:
            stop = next(stop for stop in accumulate(slices) if stop > first)
            budget = max(budget, chunking.max_step_tokens)
        left = budget - sum(count for _, count in pieces)
        is_first = len(pieces) == decodes
        if is_first:  # if a slow link makes the budget small, decodes may use all of it
            left = max(left, min(chunking.least_tokens, -(-budget // 2)))
        most = min(stop - first, left)
        if most < 1:
            return 0
        return self._within_latency(pieces, first, most, is_first) if decoding else most

    def _within_latency(
        self, pieces: Sequence[Piece], first: int, most: int, is_first: bool
    ) -> int:
        """The most tokens with which the step keeps its promise.

        The cost holds for steps that follow similar ones. A step after a much shorter one also
        waits for its turn, so chunks grow from step to step, at most twofold.
        """
        cost, limit = self._chunking.inter_token_s, self._chunking.max_inter_token_latency_s
        if cost is None or limit is None:
            return most

        def keeps(tokens: int) -> bool:
            return self._slower * cost((*pieces, (first, tokens)), self._window) <= limit

        most = min(most, max(self._chunking.least_tokens, 2 * self._before))
        if keeps(most):
            return most
        # One chunk runs even if the decodes by themselves take longer than promised.
        fits, too_many = (min(most, self._chunking.least_tokens) if is_first else 0), most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if keeps(middle):
                fits = middle
            else:
                too_many = middle
        return fits
