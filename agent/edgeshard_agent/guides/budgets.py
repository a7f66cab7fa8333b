"""Limits on the processor time of guides. Pure: times are values.

A request may use a grace, for reading its guide, plus a fixed time for each token after it. Each
requester (party) has a share of a core for everything that is not cheap. A party over its share
waits until the share has refilled, and others continue meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GRACE_S, TOKEN_S = 2.0, 0.02
"""Processor time of one request: at the beginning, and more with each token of its answer."""
CHEAP_S = 0.005
"""Processor time that a mask may take without being charged: masks of JSON schemas take a tenth of
it with 150,000 tokens.
"""
SHARE, BURST_S = 0.25, 5.0
"""A party's share of a core for expensive masks, and how much of it may be saved up."""
MOST_IDLE = 256
"""Parties that are remembered though they have all their share."""


@dataclass(slots=True)
class RequestBudget:
    """The processor time that one request's guide has used, in seconds."""

    used_s: float = 0.0
    tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.used_s > GRACE_S + TOKEN_S * self.tokens


@dataclass(slots=True)
class _Share:
    """`left_s` may be below zero: the cost of a mask is known only after it is made."""

    left_s: float
    at_s: float

    def come_in(self, now_s: float) -> float:
        self.left_s, self.at_s = min(BURST_S, self.left_s + SHARE * max(0.0, now_s - self.at_s)), now_s
        return self.left_s


@dataclass(slots=True)
class Shares:
    """The share of each party that has used some. `now_s` is of a steady clock."""

    _used: dict[str, _Share] = field(default_factory=dict)

    def wait_s(self, party: str, now_s: float) -> float:
        """Seconds until a party may have a mask made; 0 if it may now."""
        share = self._used.get(party)
        return 0.0 if share is None else max(0.0, -share.come_in(now_s) / SHARE)

    def charge(self, party: str, used_s: float, now_s: float) -> None:
        """Charge a party for the processor time of a mask."""
        if used_s <= CHEAP_S:
            return
        share = self._used.setdefault(party, _Share(BURST_S, now_s))
        share.come_in(now_s)
        share.left_s -= used_s
        if len(self._used) > MOST_IDLE:
            self._used = {who: of for who, of in self._used.items() if of.come_in(now_s) < BURST_S}
