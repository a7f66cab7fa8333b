"""Costs of a step on each stage of a placement, so that a head can size its steps. Pure.

A few numbers a stage replace a whole profile. They are seconds by the rows of a step (weights are
read once, then arithmetic dominates), and seconds for each pair of a query and a key it sees. The
hop to the next stage has seconds by tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.model import attended_pairs

Piece = tuple[int, int]
"""(first position, tokens) of one request in a step."""
InterTokenSeconds = Callable[[Sequence[Piece], int], float]
"""(pieces of a step, steps in flight) -> seconds between two tokens of a stream while every step in
flight is like this one. It rises with either."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one stage's steps, and of the hop after it (the last one's leads back to the
    head).

    `decode_s` and `prefill_s` are given at the token counts `rows`, ascending, without attention's
    cost; between and beyond them, lines go through the two nearest. A chunk after earlier positions
    takes `prefill_behind_s` a token more, for its mask. Sliding windows are left out, so the cost
    of a long context is rather too high.
    """

    rows: tuple[int, ...]
    decode_s: tuple[float, ...]
    prefill_s: tuple[float, ...]
    decode_pair_s: float
    prefill_pair_s: float
    hop_delay_s: float
    hop_s: float
    hop_token_s: float
    prefill_behind_s: float = 0.0

    def check(self) -> None:
        if not len(self.rows) == len(self.decode_s) == len(self.prefill_s) > 0:
            raise InvalidArgumentError(
                "rows: they and their seconds differ in number", field="rows"
            )

    def step_s(self, pieces: Sequence[Piece]) -> float:
        """Seconds to compute a step: decodes are its pieces of one token."""
        seconds, chunks = 0.0, False
        for first, count in pieces:
            if count == 1:
                seconds += self.decode_pair_s * (first + 1)
            else:
                chunks = True
                seconds += self.prefill_pair_s * attended_pairs(count, first)
                seconds += self.prefill_behind_s * count if first else 0.0
        tokens = sum(count for _, count in pieces)
        return seconds + _line(self.rows, self.prefill_s if chunks else self.decode_s, tokens)

    def transfer_s(self, tokens: int) -> float:
        """Seconds a step of `tokens` tokens occupies the hop after this stage."""
        return self.hop_s + self.hop_token_s * tokens


def compute_s(stages: Sequence[StageCost], pieces: Sequence[Piece]) -> float:
    """Seconds in which all stages together compute a step."""
    return sum(stage.step_s(pieces) for stage in stages)


def inter_token_s(stages: Sequence[StageCost], pieces: Sequence[Piece], in_flight: int) -> float:
    """Seconds between two tokens of a stream while `in_flight` steps like this one follow each
    other around the ring.

    max(R, m B): the round, or all the steps' turns at the busiest stage or link, whichever is
    longer.
    """
    tokens = sum(count for _, count in pieces)
    computing = [stage.step_s(pieces) for stage in stages]
    sending = [stage.transfer_s(tokens) for stage in stages]
    round_s = sum(computing) + sum(sending) + sum(stage.hop_delay_s for stage in stages)
    return max(round_s, in_flight * max(*computing, *sending))


def _line(nodes: Sequence[int], values: Sequence[float], at: int) -> float:
    """The line in pieces through (nodes, values), extended by its first and last piece; never below
    0."""
    if len(nodes) == 1:
        return values[0]
    upper = min(max(bisect_right(nodes, at), 1), len(nodes) - 1)
    low, high = nodes[upper - 1], nodes[upper]
    share = (at - low) / (high - low)
    return max(0.0, values[upper - 1] + share * (values[upper] - values[upper - 1]))
