"""A plan at saturation: as many requests run as it holds, and another begins whenever one ends. Pure.

The steady rate of a site is what it serves then. `played_rate` has it by simulation, in the steps that a head forms;
`steady_rate` reads it from the times of tokens, simulated or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

from edgeshard.domain.errors import invalid
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.simulation.serving import ServedRequest, serve
from edgeshard.planning.simulation.simulated_pipeline import head_schedule, serving_ring
from edgeshard.planning.solvers.instance import Cut

WAVES = 3
"""Requests behind each of those that run at first."""
_GOLDEN = 0.6180339887498949
"""Steps of this size go around the circle without coming close to where they were."""


def saturating(running: int, prompt_tokens: int, new_tokens: int, waves: int = WAVES) -> list[ServedRequest]:
    """Requests that are all there at the start, for a plan of which `running` run at once.

    The answers of those that run at first end one after another, as if they had been running for a while; those behind
    them are whole.
    """
    shares = [total % 1.0 for total in accumulate(repeat(_GOLDEN, running))]
    first = [ServedRequest(0.0, prompt_tokens, max(1, round(share * new_tokens))) for share in shares]
    return first + [ServedRequest(0.0, prompt_tokens, new_tokens)] * (waves * running)


def steady_rate(token_s: Sequence[Sequence[float]], running: int) -> float:
    """Tokens a second while `running` requests ran: from when that many had ended until only so many were left.

    `token_s` are the times of each request's tokens. Raises InvalidArgumentError for less than two waves behind the
    first requests.
    """
    if len(token_s) < 3 * running:
        raise invalid("requests", f"are {len(token_s)}; a steady rate needs at least {3 * running}")
    ends = sorted(times[-1] for times in token_s)
    began, ended = ends[running - 1], ends[-running - 1]
    count = sum(began < time <= ended for times in token_s for time in times)
    return count / (ended - began)


def played_rate(costs: Costs, cut: Cut, load: Load) -> float:
    """Tokens a second of a cut at saturation, with the problem's prompts and answers.

    Raises InvalidArgumentError for `head_on_source`, whose arrivals are not simulated.
    """
    problem = costs.problem
    requests = saturating(load.requests, problem.prompt_tokens, problem.new_tokens)
    return steady_rate(
        serve(serving_ring(costs, cut), requests, head_schedule(costs, cut, load)).token_s, load.requests
    )
