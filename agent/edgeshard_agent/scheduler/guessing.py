"""Guesses of a request's next tokens: the tokens its guide forces, or the tokens after the last
occurrence of its newest tokens. Pure.

A guess costs a row of a step, and saves a step if it is right. Nothing else depends on it: a token
after a guess counts only if the guess equals the drawn token. (docs/speculation.md)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

from edgeshard.domain.deployments.guesses import MOST_GUESSES
from edgeshard.domain.deployments.step_cost import InterTokenSeconds
from edgeshard.planning.costs.guesses import that_pay

LONGEST_MATCH, SHORTEST_MATCH = 4, 2
MOST_LOOKED_AT = 16
"""Earlier places with the same two newest tokens, the latest first, that a longer match is looked
for among."""
MOST_ROWS = MOST_GUESSES + 1
"""Rows that decodes may have in a step with guesses. This number costs little compared with the
weights that the step reads.
"""
MOST_INDEXED = 4096
"""Maximum number of tokens that one call adds to the index, since a step waits for it: after longer
prompts guesses begin later.
"""
MOST_REST = 64
"""Tokens that a request goes without guesses at most, after many that were wrong."""


class Proposer(Protocol):
    """Guesses for one request."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` guesses of the continuation of `tokens`, which begin with the tokens of
        the previous call."""


class NgramDrafter:
    """The tokens after the longest match of the newest tokens, of four to two; of several the
    latest. If the continuation runs into the newest token itself, the text repeats, and so does the
    guess.

    Each token is put into the index once, and a proposal looks at a bounded number of places.
    """

    def __init__(self, shortest: int = SHORTEST_MATCH) -> None:
        """A match shorter than `shortest` gives no guess."""
        self._shortest = shortest
        self._latest: dict[int, int] = {}
        """The position after the latest occurrence of two neighbouring tokens."""
        self._before: list[int] = [-1, -1]
        """The position of the previous occurrence of the two tokens before each position."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        end, first = len(tokens), len(self._before)
        # Tokens before the last position have a successor; the newest tokens have none yet.
        for position in range(first, min(end, first + MOST_INDEXED)):
            pair = tokens[position - 2] << 32 | tokens[position - 1]
            self._before.append(self._latest.get(pair, -1))
            self._latest[pair] = position
        if limit < 1 or end < SHORTEST_MATCH or len(self._before) < end:
            return []
        place = self._latest.get(tokens[-2] << 32 | tokens[-1], -1)
        best, longest = -1, 0
        for _ in range(MOST_LOOKED_AT):
            if place < 0 or longest == LONGEST_MATCH:
                break
            match = self._match(tokens, place)
            if match > longest:
                best, longest = place, match
            place = self._before[place]
        if longest < self._shortest:
            return []
        return [tokens[best + index % (end - best)] for index in range(limit)]

    @staticmethod
    def _match(tokens: Sequence[int], place: int) -> int:
        """How many tokens in front of a position are the newest ones."""
        for length in range(SHORTEST_MATCH, LONGEST_MATCH):
            if place <= length or tokens[place - 1 - length] != tokens[-1 - length]:
                return length
        return LONGEST_MATCH


@dataclass(frozen=True, slots=True)
class DraftPacing:
    """How many guesses a request gets: `length`, or 0 while it rests: for the next `rest` tokens
    after its last `misses` rounds in a row were all wrong."""

    length: int = 2
    rest: int = 0
    misses: int = 0

    def after(self, proposed: int, accepted: int) -> DraftPacing:
        """The pace after `accepted` of `proposed` guesses were right. All: twice as many are
        allowed. Some: this number plus one. None: it rests, twice as long each time."""
        if not proposed:
            return replace(self, rest=self.rest - 1) if self.rest else self
        if accepted == proposed:
            return DraftPacing(min(MOST_ROWS, 2 * max(self.length, proposed)))
        if accepted:
            return DraftPacing(min(MOST_ROWS, accepted + 1))
        return DraftPacing(
            max(1, self.length // 2), min(MOST_REST, 2**self.misses), self.misses + 1
        )

    @property
    def most(self) -> int:
        return 0 if self.rest else self.length


@dataclass(slots=True)
class Guessed:
    """The data kept of one request for its guesses."""

    proposer: Proposer
    pace: DraftPacing = field(default_factory=DraftPacing)
    are_forced: bool = False
    """Whether its guide forces its newest guesses: the pace learns nothing from them."""
    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Its steps while no other request decoded, by the numbers of guessed and of right tokens."""
    are_drafted: bool = False
    """Whether its newest guesses are requested from the draft: they are none of the proposer's."""

    def noted(self, proposed: int, accepted: int, *, is_alone: bool = False) -> None:
        """So many of the newest guesses were right."""
        if is_alone:
            self.counted[proposed, accepted] += 1
        if not self.are_forced:
            self.pace = (
                self.pace.after(0, 0) if self.are_drafted else self.pace.after(proposed, accepted)
            )


@dataclass(frozen=True, slots=True)
class Guessing:
    """The guesses for the requests of a pipeline, each with a `proposer` of its own. No token is
    guessed after `ends`. `inter_token_s` is the cost of a step, if known. With `drafts`, a smaller
    model is queried if nothing is forced and the proposer has no guess. If stages keep states of
    requests, each guess of a running request has one of `slots` slots on every stage; None if they
    keep no states."""

    ends: frozenset[int] = frozenset()
    inter_token_s: InterTokenSeconds | None = None
    proposer: Callable[[], Proposer] = NgramDrafter
    drafts: bool = False
    slots: int | None = None

    def guesses(
        self, guessed: Guessed, tokens: Sequence[int], most: int, forced: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Guesses for a request with these tokens: at most `most`, and no more than pay. They are
        the `forced` tokens, or as many guesses as its pace allows."""
        guessed.are_forced = bool(forced) and most > 0
        most = min(most, len(forced) if guessed.are_forced else guessed.pace.most)
        if most < 1:
            return ()
        proposal = forced[:most] if guessed.are_forced else guessed.proposer.propose(tokens, most)
        guesses = tuple(takewhile(lambda token: token not in self.ends, proposal))
        return self._that_pay(guesses, len(tokens) - 1)

    def asked(self, guessed: Guessed, guesses: Sequence[int], most: int) -> int:
        """How many guesses are requested from the draft for a request that has these guesses; at
        most `most`."""
        guessed.are_drafted = self.drafts and most > 0 and not (guesses or guessed.are_forced)
        return most if guessed.are_drafted else 0

    def _that_pay(self, guesses: tuple[int, ...], position: int) -> tuple[int, ...]:
        if self.inter_token_s is None:
            return guesses
        return guesses[: that_pay(self.inter_token_s, position, len(guesses))]
