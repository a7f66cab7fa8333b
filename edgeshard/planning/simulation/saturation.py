"""A plan at saturation: as many requests run as it holds, and another begins whenever one ends. Pure.

The steady rate of a site is its rate then. `steady_rate` reads it from the times of tokens, simulated or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

from edgeshard.domain.errors import invalid
from edgeshard.planning.simulation.serving import ServedRequest

WAVES = 3
"""Requests that follow each of the first running ones."""
_GOLDEN = 0.6180339887498949
"""Steps of this size move around the circle without returning close to earlier positions."""


def saturating(running: int, prompt_tokens: int, new_tokens: int, waves: int = WAVES) -> list[ServedRequest]:
    """Requests that are all there at the start, for a plan of which `running` run at once.

    The answers of the first running requests end one after another, as if they had been running for
    a while; the following ones are whole.
    """
    shares = [total % 1.0 for total in accumulate(repeat(_GOLDEN, running))]
    first = [ServedRequest(0.0, prompt_tokens, max(1, round(share * new_tokens))) for share in shares]
    return first + [ServedRequest(0.0, prompt_tokens, new_tokens)] * (waves * running)


def steady_rate(token_s: Sequence[Sequence[float]], running: int) -> float:
    """Tokens a second while `running` requests ran: from the end of that many requests until only
    that many were left.

    `token_s` are the times of each request's tokens. Raises InvalidArgumentError for less than two
    waves after the first requests.
    """
    if len(token_s) < 3 * running:
        raise invalid("requests", f"are {len(token_s)}; a steady rate needs at least {3 * running}")
    ends = sorted(times[-1] for times in token_s)
    began, ended = ends[running - 1], ends[-running - 1]
    count = sum(began < time <= ended for times in token_s for time in times)
    return count / (ended - began)
