"""Whose guide has the matchers next, and what guides may use of the processor. Pure: times are values.

A request has a grace, for what its guide takes to read, and so much for each token beyond it. Who asks has a share of a
core for all that is not cheap: whoever is over it waits until it has come in again, and others go on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeshard.domain.fair_shares import ServedTokens

GRACE_S, TOKEN_S = 2.0, 0.02
"""Processor time of one request: at the beginning, and more with each token of its answer."""
CHEAP_S = 0.005
"""What a mask may take without a word: those of JSON schemas take a tenth of it with 150,000 tokens."""
SHARE, BURST_S = 0.25, 5.0
"""Of a core, for the dear masks of one party, and how much of that it may have saved up."""
MOST_IDLE = 256
"""Parties that are remembered though they have all their share."""


@dataclass(slots=True)
class RequestBudget:
    """What one request's guide has used, in seconds of processor time."""

    used_s: float = 0.0
    tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.used_s > GRACE_S + TOKEN_S * self.tokens


@dataclass(slots=True, eq=False)
class Turn:
    """A mask to be made for `client`, a party. `arrival` orders those of one party."""

    client: str
    arrival: int = 0
    priority: int = 0


@dataclass(slots=True)
class _Share:
    """`left_s` may be below zero: what a mask takes is known when it is made."""

    left_s: float = BURST_S
    at_s: float = 0.0

    def come_in(self, now_s: float) -> float:
        self.left_s, self.at_s = min(BURST_S, self.left_s + SHARE * max(0.0, now_s - self.at_s)), now_s
        return self.left_s


@dataclass(slots=True)
class Turns:
    """Masks that wait: of parties that have some of their share left, the least served first. `now_s` is of a steady
    clock."""

    _waiting: list[Turn] = field(default_factory=list)
    _served_us: ServedTokens = field(default_factory=ServedTokens)
    _shares: dict[str, _Share] = field(default_factory=dict)
    _arrivals: int = 0

    def put(self, turn: Turn) -> None:
        self._arrivals += 1
        turn.arrival = self._arrivals
        self._served_us.open(turn.client)
        self._waiting.append(turn)

    def drop(self, turn: Turn) -> None:
        """Nobody wants it any more. One that has begun is no longer here."""
        if turn in self._waiting:
            self._waiting.remove(turn)
            self._served_us.close(turn.client)

    def next(self, now_s: float) -> Turn | None:
        """Whose turn it is; `ended` says when it is over."""
        due = [turn for turn in self._waiting if self._left(turn.client, now_s) >= 0]
        turn = self._served_us.first(due)
        if turn is not None:
            self._waiting.remove(turn)
        return turn

    def wait_s(self, now_s: float) -> float | None:
        """Until one of those that wait may have its turn; None where nothing waits."""
        waits = [max(0.0, -self._left(turn.client, now_s) / SHARE) for turn in self._waiting]
        return min(waits) + 0.001 if waits else None

    def ended(self, turn: Turn, used_s: float, now_s: float) -> None:
        """The turn took so much of the processor."""
        self._served_us.charge(turn.client, round(used_s * 1e6))
        self._served_us.close(turn.client)
        if used_s > CHEAP_S:
            self._shares.setdefault(turn.client, _Share(BURST_S, now_s)).come_in(now_s)
            self._shares[turn.client].left_s -= used_s
            if len(self._shares) > MOST_IDLE:
                self._shares = {who: of for who, of in self._shares.items() if of.come_in(now_s) < BURST_S}

    def _left(self, client: str, now_s: float) -> float:
        share = self._shares.get(client)
        return BURST_S if share is None else share.come_in(now_s)
