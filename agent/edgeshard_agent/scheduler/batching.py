"""How many steps are in flight, when the next may begin, and how decodes are spread over micro-batches. Pure.

A micro-batch has no list of members: it is whatever one step carries. Requests whose tokens came back together go on
together; a step takes at most an equal share of all decoding requests, so a micro-batch that grew too large leaves some
to the next one, and a request that joins goes to whichever has room first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.mode import Mode
from edgeshard.domain.step_cost import Piece

InterTokenSeconds = Callable[[Sequence[Piece], int], float]
"""(pieces of a step, steps in flight) -> seconds between two tokens of a stream while every step in flight is like
this one. It rises with either."""


@dataclass(frozen=True, slots=True)
class Batching:
    """What the placement allows: `micro_batch` requests (b) in each of `micro_batches` decode steps (m) in flight.

    `window` is the most steps in flight, prompts' steps included. `fixed` m are used even where fewer would be quicker.
    """

    mode: Mode
    window: int
    micro_batch: int
    micro_batches: int
    fixed: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "micro_batch", "micro_batches"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be 1 or more", field=name)

    @property
    def places(self) -> int:
        """Requests that may run at once."""
        return self.micro_batch * self.micro_batches


class Flight:
    """The steps in flight, oldest first, and whether another may begin."""

    def __init__(self, batching: Batching) -> None:
        self._mode = batching.mode
        self._window = 1 if batching.mode is Mode.SEQUENTIAL else batching.window
        self._decodes: deque[bool] = deque()
        self._round_over = False

    def __len__(self) -> int:
        return len(self._decodes)

    @property
    def decode_steps(self) -> int:
        """Steps in flight that carry decodes: one for each micro-batch."""
        return sum(self._decodes)

    @property
    def window(self) -> int:
        return self._window

    @property
    def has_room(self) -> bool:
        return len(self) < self._window and not self._round_over

    def begin(self, decodes: bool) -> None:
        self._decodes.append(decodes)

    def end(self) -> None:
        """The oldest step is back. With bubbles the next begins only when all are."""
        self._decodes.popleft()
        self._round_over = self._mode is Mode.BUBBLES and bool(self._decodes)


class Spread:
    """Into how many micro-batches the decoding requests go."""

    def __init__(self, batching: Batching, inter_token_s: InterTokenSeconds | None = None) -> None:
        self._batching = batching
        self._inter_token_s = inter_token_s
        self._chosen: tuple[int, int] = (0, 1)

    def micro_batches(self, pieces: Sequence[Piece]) -> int:
        """How many micro-batches for requests that decode `pieces` next: with a cost, those of the soonest tokens.

        Without one, or where the number is fixed, as many as there may be: while a stage reads weights for most of its
        time, a smaller batch is no slower, and more of them keep more stages at work. A choice stands until the number
        of requests changes.
        """
        count = len(pieces)
        most = min(self._batching.micro_batches, count)
        least = -(-count // self._batching.micro_batch)
        if self._inter_token_s is None or self._batching.fixed or most <= least:
            return max(1, most)
        if self._chosen[0] != count:
            cost = self._inter_token_s
            # The slowest micro-batch counts: say that of the longest contexts.
            longest = sorted(pieces, reverse=True)
            # Of equal ones the most: smaller batches leave more room for prompts' chunks.
            best = min(range(most, least - 1, -1), key=lambda parts: cost(longest[: -(-count // parts)], parts))
            self._chosen = (count, best)
        return self._chosen[1]
