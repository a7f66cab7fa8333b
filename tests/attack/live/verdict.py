"""What an attack may cost the others. Pure: figures in, what they miss out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_RATIO = 1.5
"""Of an honest client's median gap to that of the baseline."""
WORST_GAP_S = 1.0
WORST_CALL_S = 1.0
"""Of an operator's call."""
MOST_GROWN_BYTES = 300_000_000
"""Of the coordinator and its children above what they had before."""
MOST_LOG_BYTES = 10_000_000
"""A minute, of the coordinator."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Between the tokens of an honest client, in seconds. From a request to its first token is one, too, however often
    the request was `refused` before, and so is what was still waited for at the end."""

    tokens: int
    median_s: float
    worst_s: float
    refused: Mapping[str, int]

    @classmethod
    def of(cls, gaps: Sequence[float], tokens: int, refused: Mapping[str, int]) -> Gaps:
        return cls(tokens, statistics.median(gaps) if gaps else 0.0, max(gaps, default=0.0), dict(refused))


@dataclass(frozen=True, slots=True)
class Figures:
    """What others met for some time: clients by how they ask, an operator's longest call by connection, in seconds.

    `joined_s` is how long a joiner took, None for one that did not join. `own_pause_s` is the longest for which the
    process that measured stood still itself: it is in the other figures, too, and no fault of the site.
    """

    clients: Mapping[str, Gaps]
    calls: Mapping[str, float]
    joined_s: float | None
    grown_bytes: int
    log_bytes_per_minute: float
    own_pause_s: float = 0.0


def missed(attacked: Figures, baseline: Figures, wrong: Sequence[str] = ()) -> list[str]:
    """The limits that the figures of an attack miss, beside a baseline of the same share of a core; what was `wrong` of
    the attack's own outcome comes first."""
    found = list(wrong)
    for name, gaps in attacked.clients.items():
        before = baseline.clients[name]
        if not gaps.tokens or not before.tokens:
            found.append(f"{name}: no token came {'in the baseline' if gaps.tokens else 'under the attack'}")
            continue
        ratio = gaps.median_s / before.median_s
        if ratio > MOST_RATIO:
            found.append(f"{name}: median gap {ratio:.2f} times the baseline's, at most {MOST_RATIO:g}")
        if gaps.worst_s > WORST_GAP_S:
            found.append(
                f"{name}: longest gap {gaps.worst_s:.2f} s, at most {WORST_GAP_S:g} (baseline {before.worst_s:.2f})"
            )
    for name, took_s in attacked.calls.items():
        if took_s > WORST_CALL_S:
            found.append(f"operator, {name}: a call took {took_s:.2f} s, at most {WORST_CALL_S:g}")
    if attacked.joined_s is None:
        found.append("the honest joiner did not join")
    if attacked.grown_bytes > MOST_GROWN_BYTES:
        found.append(
            f"the coordinator grew by {attacked.grown_bytes / 1e6:.0f} MB, at most {MOST_GROWN_BYTES / 1e6:.0f}"
        )
    if attacked.log_bytes_per_minute > MOST_LOG_BYTES:
        found.append(
            f"its log grew by {attacked.log_bytes_per_minute / 1e6:.1f} MB a minute, at most {MOST_LOG_BYTES / 1e6:.0f}"
        )
    return found
