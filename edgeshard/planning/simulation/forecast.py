"""A plan under load: the latencies of its requests, and how busy its nodes are, by simulation.
Pure.

`forecast` serves requests that arrive one after another, in the steps that the head of the plan
would form; `together` runs the batch that the plan's own figures describe; `steady_rate`
reads the rate at saturation from the times of tokens, simulated or measured. Arrivals and lengths
are passed in as values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, repeat

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import invalid
from edgeshard.domain.models.model import LayerRange
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.inputs.problem import PlanProblem
from edgeshard.planning.search.plan import PlanResult
from edgeshard.planning.simulation.serving import (
    Schedule,
    ServedRequest,
    Serving,
    percentile,
    serve,
)
from edgeshard.planning.simulation.simulated_pipeline import (
    head_schedule,
    ring,
    serving_ring,
    traffic,
)
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import Visit

WAVES = 3
"""Requests that follow each of the first running ones."""
_GOLDEN = 0.6180339887498949
"""Steps of this size move around the circle without returning close to earlier positions."""


def saturating(
    running: int, prompt_tokens: int, new_tokens: int, waves: int = WAVES
) -> list[ServedRequest]:
    """Requests that are all there at the start, for a plan of which `running` run at once.

    The answers of the first running requests end one after another, as if they had been running for
    a while; the following ones are whole.
    """
    shares = [total % 1.0 for total in accumulate(repeat(_GOLDEN, running))]
    first = [
        ServedRequest(0.0, prompt_tokens, max(1, round(share * new_tokens))) for share in shares
    ]
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


ASSUMPTIONS = (
    "nodes and links take the measured times: no jitter, no lost frames, no other load",
    "all requests are of one client and priority, stop at their length, share no prefix, and no "
    "latency is promised",
    "the client's own link, the coordinator and the tokeniser take no time",
)


@dataclass(frozen=True, slots=True)
class ForecastSpread:
    """A figure over requests or tokens, in seconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> ForecastSpread:
        """The spread of values; all 0 if there are none, as for the gaps between tokens when every
        answer is one token."""
        mean = sum(values) / len(values) if values else 0.0
        return cls(mean, *(percentile(values, percent) for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A stage's node: the shares of the run that it computes, and that its link to `receiver` is
    sent on."""

    node: str
    layers: LayerRange
    computing: float
    receiver: str
    sending: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The outcome of a run, which lasts from the first arrival to the last token."""

    requests: int
    tokens: int
    ttft_s: ForecastSpread
    """From a request's arrival to its first token."""
    inter_token_s: ForecastSpread
    """Gaps between two tokens of a request, over all gaps."""
    time_per_token_s: ForecastSpread
    """The mean gap of each request."""
    end_to_end_s: ForecastSpread
    """From a request's arrival to its last token."""
    span_s: float
    tokens_per_s: float
    nodes: tuple[NodeLoad, ...]
    bubble_share: float
    """Share of the run that a node does not compute, the mean over nodes."""
    waiting: int
    """Requests that waited for a place when the last one arrived; many of them mean that the load
    is too high."""
    token_budget: int | None
    """Most tokens of a step; None if all requests start together as a batch."""
    visits: tuple[Visit, ...] = field(repr=False)
    """Every service of a node or link, by the order of its start."""

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.span_s if self.span_s else float("inf")


def forecast(result: PlanResult, requests: Sequence[ServedRequest]) -> Forecast:
    """Serve the requests on a feasible plan.

    Raises InvalidArgumentError naming the request that the plan holds no memory for, or
    `head_on_source`, which is simulated `together` only.
    """
    assert result.prediction is not None
    for index, request in enumerate(requests):
        if request.prompt_tokens + request.new_tokens > result.problem.held_tokens:
            demand = f"has {request.prompt_tokens} tokens in and {request.new_tokens} out"
            raise invalid(f"requests[{index}]", f"{demand}; {most_held(result.problem)}")
    return _served(result, requests)[0]


def saturated(result: PlanResult) -> Forecast:
    """A feasible plan at saturation: its `tokens_per_s` cover the time in which as many requests
    run as it holds. Raises InvalidArgumentError for `head_on_source`."""
    assert result.prediction is not None
    running, problem = result.prediction.load.requests, result.problem
    outcome, token_s = _served(
        result, saturating(running, problem.prompt_tokens, problem.new_tokens)
    )
    return replace(outcome, tokens_per_s=steady_rate(token_s, running))


def _served(
    result: PlanResult, requests: Sequence[ServedRequest]
) -> tuple[Forecast, Sequence[Sequence[float]]]:
    """The outcome, and the times of each request's tokens."""
    assert result.prediction is not None
    costs = Costs(result.problem)
    cut = result.prediction.cut
    load = result.prediction.load
    schedule = head_schedule(costs, cut, load)
    served = serve(serving_ring(costs, cut), requests, schedule)
    outcome = _forecast(
        result,
        [request.arrival_s for request in requests],
        served.token_s,
        (served.node_utilisation, served.link_utilisation, served.bubble_share),
        _visits(result, served, schedule),
        schedule.token_budget,
    )
    return outcome, served.token_s


def together(result: PlanResult, mode: Mode = Mode.NO_BUBBLES) -> Forecast:
    """Run the batch that a feasible plan's figures are of: all its requests there at the start, all
    of one length.

    The prompt of a single request goes in the plan's slices.
    """
    assert result.prediction is not None
    costs = Costs(result.problem)
    cut = result.prediction.cut
    load = result.prediction.load
    work = traffic(result.problem, load.batch, load.micro_batches, result.prediction.slices)
    run = simulate(ring(costs, cut, load.batch), work, mode)
    return _forecast(
        result,
        [0.0] * load.requests,
        [times for times in run.token_s for _ in range(load.batch)],
        (run.node_utilisation, run.link_utilisation, run.bubble_share),
        run.timeline,
        None,
    )


def most_held(problem: PlanProblem) -> str:
    """The longest request, and the remedy for longer ones."""
    return (
        f"the plan holds {problem.held_tokens} for a request: plan with more prompt_tokens or "
        "new_tokens, or simulate "
        "shorter ones"
    )


def _forecast(
    result: PlanResult,
    arrivals_s: Sequence[float],
    token_s: Sequence[Sequence[float]],
    busy: tuple[Sequence[float], Sequence[float], float],
    visits: Sequence[Visit],
    token_budget: int | None,
) -> Forecast:
    """The figures of a run. `busy` are the shares of nodes and links, and of bubbles."""
    nodes, links, bubble_share = busy
    tokens = sum(len(times) for times in token_s)
    span_s = max(times[-1] for times in token_s) - min(arrivals_s)
    names = [stage.node for stage in result.stages]
    arrived = list(zip(arrivals_s, token_s, strict=True))
    assert result.prediction is not None
    finished = sum(times[-1] <= max(arrivals_s) for times in token_s)
    return Forecast(
        requests=len(token_s),
        tokens=tokens,
        ttft_s=ForecastSpread.of([times[0] - arrival for arrival, times in arrived]),
        inter_token_s=ForecastSpread.of(
            [later - earlier for times in token_s for earlier, later in pairwise(times)]
        ),
        time_per_token_s=ForecastSpread.of(
            [(times[-1] - times[0]) / (len(times) - 1) for times in token_s if len(times) > 1]
        ),
        end_to_end_s=ForecastSpread.of([times[-1] - arrival for arrival, times in arrived]),
        span_s=span_s,
        tokens_per_s=tokens / span_s if span_s else float("inf"),
        nodes=tuple(
            NodeLoad(
                node=stage.node,
                layers=stage.layers,
                computing=nodes[index],
                receiver=names[(index + 1) % len(names)] if links else "",
                sending=links[index] if links else 0.0,
            )
            for index, stage in enumerate(result.stages)
        ),
        bubble_share=bubble_share,
        waiting=max(0, len(token_s) - finished - result.prediction.load.requests),
        token_budget=token_budget,
        visits=tuple(visits),
    )


def _visits(result: PlanResult, served: Serving, schedule: Schedule) -> list[Visit]:
    """The time of each step at each station. Steps in flight at once differ in `micro_batch`, their
    number is `token`."""
    names = [stage.node for stage in result.stages]
    visits = []
    for number, step in enumerate(served.steps):
        turn = number % schedule.steps_in_flight
        kind = "prefill" if len(step.spans) > step.decodes else "decode"
        for node, (start, end) in zip(names, step.stage_s, strict=True):
            visits.append(Visit(node, turn, kind, number, start, end))
        for index, (start, end) in enumerate(step.hop_s):
            link = f"{names[index]} -> {names[(index + 1) % len(names)]}"
            visits.append(
                Visit(
                    link, turn, "return" if index == len(names) - 1 else "send", number, start, end
                )
            )
    return sorted(visits, key=lambda visit: visit.start_s)
