"""A bucket that fills at a steady rate and may be overdrawn, since its charges are known only after
the use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """A bucket that fills by `rate` a second and holds the amount of `holds_s` seconds. It is full
    until something is charged.

    `full_at` is when it will be full again, in seconds of the caller's clock: one number holds the
    level and the debt.
    """

    rate: float
    holds_s: float
    full_at: float = float("-inf")

    def charged(self, amount: float, now: float) -> TokenBucket:
        return TokenBucket(self.rate, self.holds_s, max(self.full_at, now) + amount / self.rate)

    def debt_s(self, now: float) -> float:
        """Seconds until it is out of debt; 0 if it has none."""
        return max(0.0, self.full_at - now - self.holds_s)

    def is_full(self, now: float) -> bool:
        return self.full_at <= now
