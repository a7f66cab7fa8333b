"""The cost that an attack may have for others. Pure: computes missed limits from figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_SHARE = 0.7
"""Fraction of the baseline's tokens a second that an honest client must keep."""
MAX_GAP_S = 1.0
MAX_CALL_S = 1.0
"""Limit of an operator's call."""
MAX_GROWTH_BYTES = 200_000_000
"""Limit of the growth of an honest process and its children."""
MAX_LOG_BYTES = 10_000_000
"""A minute, of the coordinator."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Between the tokens of an honest client, in seconds. The time from a request to its first
    token counts, too, including earlier refusals (`refused`), and so does the outstanding wait at
    the end."""

    tokens: int
    median_s: float
    worst_s: float
    refused: Mapping[str, int]

    @classmethod
    def of(cls, gaps: Sequence[float], tokens: int, refused: Mapping[str, int]) -> Gaps:
        return cls(
            tokens, statistics.median(gaps) if gaps else 0.0, max(gaps, default=0.0), dict(refused)
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of others over some time: clients by API, an operator's longest call by
    connection, in seconds.

    `joined_s` is the time of a joiner, None if it did not join. `grown_bytes` is by process: the
    coordinator and the agents. `epochs` has each deployment's epoch at the beginning and at the
    end. `own_pause_s` is the longest for which the process that measured stood still itself: it is
    in the other figures, too, and no fault of the site.
    """

    seconds: float

    clients: Mapping[str, Gaps]
    calls: Mapping[str, float]
    joined_s: float | None
    grown_bytes: Mapping[str, int]
    log_bytes_per_minute: float
    epochs: Mapping[str, tuple[int, int]]
    own_pause_s: float = 0.0

    def share_of(self, baseline: Figures, client: str) -> float:
        """The tokens a second of a client, divided by those that it had in the baseline."""
        rate = self.clients[client].tokens / self.seconds
        return rate / (baseline.clients[client].tokens / baseline.seconds)


def missed(attacked: Figures, baseline: Figures, wrong: Sequence[str] = ()) -> list[str]:
    """The limits that the figures of an attack miss, compared with a baseline of the same share of
    a core. The faults in `wrong`, the attack's own outcome, are first."""
    found = [*wrong, *_missed_by_clients(attacked, baseline)]
    for name, took_s in attacked.calls.items():
        if took_s > MAX_CALL_S:
            found.append(f"operator, {name}: a call took {took_s:.2f} s, at most {MAX_CALL_S:g}")
    if attacked.joined_s is None:
        found.append("the honest joiner did not join")
    for name, (first, last) in attacked.epochs.items():
        if first != last:
            found.append(f"{name}: its epoch went from {first} to {last}")
    for name, grown_bytes in attacked.grown_bytes.items():
        if grown_bytes > MAX_GROWTH_BYTES:
            found.append(
                f"{name} grew by {grown_bytes / 1e6:.0f} MB, at most {MAX_GROWTH_BYTES / 1e6:.0f}"
            )
    if attacked.log_bytes_per_minute > MAX_LOG_BYTES:
        found.append(
            f"its log grew by {attacked.log_bytes_per_minute / 1e6:.1f} MB a minute, at most "
            f"{MAX_LOG_BYTES / 1e6:.0f}"
        )
    return found


def _missed_by_clients(attacked: Figures, baseline: Figures) -> list[str]:
    found = []
    for name, gaps in attacked.clients.items():
        before = baseline.clients[name]
        if not gaps.tokens or not before.tokens:
            found.append(
                f"{name}: no token came {'in the baseline' if gaps.tokens else 'under the attack'}"
            )
            continue
        share = attacked.share_of(baseline, name)
        if share < MIN_SHARE:
            found.append(
                f"{name}: {share:.2f} of the baseline's tokens a second, at least {MIN_SHARE:g}"
            )
        if gaps.worst_s > MAX_GAP_S:
            found.append(
                f"{name}: longest gap {gaps.worst_s:.2f} s, at most {MAX_GAP_S:g} (baseline "
                f"{before.worst_s:.2f})"
            )
    return found
