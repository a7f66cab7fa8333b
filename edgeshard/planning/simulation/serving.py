"""Mixed serving, event by event: prompts that arrive while other requests generate. Pure: arrivals
are values.

The head forms a step as soon as one may begin. Decodes are first, each micro-batch an equal share
of them; then chunks of prompts in the order of their arrival until the step's token budget is spent
(Sarathi-Serve's schedule). A prompt's chunks follow each other without waiting; a decode waits for
its own token. Steps keep their order at every station, as they do in a ring. So a step's times are
known once it is formed: only arrivals and returns are events. (docs/papers.md#simulation;
`simulator` has the modes and the timeline of a batch that starts together.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

import numpy as np

from edgeshard.domain.errors import invalid
from edgeshard.planning.inputs.table_fields import check_count, check_number
from edgeshard.planning.simulation.timing import HopTimes, check_hops, checked_seconds


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request: when it arrives, and its tokens in and out."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step's part for one request: `tokens` positions after `context`. `sample`: its next token
    results from it."""

    request: int
    tokens: int
    context: int
    sample: bool


StepSeconds = Callable[[Sequence[StepSpan]], float]


@dataclass(frozen=True, slots=True)
class ServingRing:
    """A ring for steps of mixed spans.

    stages  seconds of a step at each stage; the last stage's include norm, head and sampling
    hops    hop s leads from stage s to s+1, the last one back to the first; empty for a single
            stage. Sending overlaps computing.
    """

    stages: tuple[StepSeconds, ...]
    hops: tuple[HopTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The head's limits: the planner's (b, m), and how prompts are fitted in."""

    batch: int = 1
    """Decodes in one step."""
    micro_batches: int = 1
    """Steps with decodes in flight; `batch` times as many requests run at once."""
    token_budget: int = 256
    """Most tokens in one step, decodes and chunks together."""
    window: int | None = None
    """Most steps in flight, including those with only chunks; None: `micro_batches`."""
    slices: Callable[[int], Sequence[int]] | None = None
    """From the tokens of a prompt to the lengths of the slices in which it goes while no request
    decodes (HPipe). None means whole prompts, as far as the budget allows."""
    slice_budget: int = 2048
    """Most tokens in a step with a slice."""

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        for name in ("batch", "micro_batches", "token_budget", "slice_budget"):
            check_count(getattr(self, name), name)
        if self.token_budget < self.batch:
            raise invalid(
                "token_budget",
                f"is {self.token_budget}; a step of {self.batch} decodes needs as many",
            )
        if self.window is not None and check_count(self.window, "window") < self.micro_batches:
            raise invalid("window", f"is {self.window}, below micro_batches {self.micro_batches}")

    @property
    def steps_in_flight(self) -> int:
        return self.window or self.micro_batches


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A step: its spans, the `decodes` first; when it was formed, and when its tokens were back at
    the head.

    `stage_s` and `hop_s` are its (start, end) at each stage and on each hop.
    """

    spans: tuple[StepSpan, ...]
    decodes: int
    formed_s: float
    back_s: float
    stage_s: tuple[tuple[float, float], ...]
    hop_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Serving:
    """The outcome of a run, in seconds; it lasts from the first arrival to the last token."""

    token_s: tuple[tuple[float, ...], ...]
    """[request][token] when the token is back at the head."""
    ttft_s: tuple[float, ...]
    """Times to the first token, from each request's arrival."""
    inter_token_s: tuple[float, ...]
    """All gaps between two tokens of a request."""
    span_s: float
    tokens_per_s: float
    node_utilisation: tuple[float, ...]
    """Share of the run that each stage computes."""
    link_utilisation: tuple[float, ...]
    """Share of the run that each hop is sent on, the return last."""
    bubble_share: float
    """Share of the run that stages do not compute, the mean over stages."""
    steps: tuple[ServedStep, ...]


def serve(ring: ServingRing, requests: Sequence[ServedRequest], schedule: Schedule) -> Serving:
    """Run the requests through the ring. Raises InvalidArgumentError naming the field that cannot
    be."""
    check_hops(len(ring.stages), ring.hops)
    schedule.check()
    if not requests:
        raise invalid("requests", "is empty; there is nothing to serve")
    for index, request in enumerate(requests):
        check_number(request.arrival_s, f"requests[{index}].arrival_s", 0.0)
        check_count(request.prompt_tokens, f"requests[{index}].prompt_tokens")
        check_count(request.new_tokens, f"requests[{index}].new_tokens")
    run = _Run(ring, requests, schedule)
    run.run()
    return _result(run, requests)


class _Run:
    """The head's queues, and the time from which each station is free.

    A request waits, then is prefilling until its last chunk is handed out, then decoding until its
    last token is back.
    """

    def __init__(
        self, ring: ServingRing, requests: Sequence[ServedRequest], schedule: Schedule
    ) -> None:
        self._ring = ring
        self._requests = requests
        self._schedule = schedule
        # (time, number, request that arrives or step that returns); the number keeps the order of
        # equal times.
        self._events: list[tuple[float, int, int | ServedStep]] = [
            (request.arrival_s, index, index) for index, request in enumerate(requests)
        ]
        self._number = len(requests)
        self._waiting: deque[int] = deque()
        self._prefilling: deque[int] = deque()
        self._ready: deque[int] = deque()
        self._prefilled = [0] * len(requests)
        self._running = self._decoding = 0
        self._in_flight = self._decode_steps = 0
        self._stage_free_s = [0.0] * len(ring.stages)
        self._link_free_s = [0.0] * len(ring.hops)
        self.token_s: list[list[float]] = [[] for _ in requests]
        self.steps: list[ServedStep] = []

    def run(self) -> None:
        heapify(self._events)
        while self._events:
            now, _, event = heappop(self._events)
            if isinstance(event, ServedStep):
                self._return(event)
            else:
                self._waiting.append(event)
            # All that happens at one time is seen before a step is formed.
            if not self._events or self._events[0][0] > now:
                self._admit()
                while self._begin_step(now):
                    pass

    def _admit(self) -> None:
        while self._waiting and self._running < self._schedule.batch * self._schedule.micro_batches:
            self._running += 1
            self._prefilling.append(self._waiting.popleft())

    def _begin_step(self, now: float) -> bool:
        """Form a step and send it, if one may begin and there is work for it."""
        if self._in_flight >= self._schedule.steps_in_flight:
            return False
        decodes = self._next_decodes()
        spans = decodes + self._next_chunks(self._schedule.token_budget - len(decodes))
        if not spans:
            return False
        step = self._served(spans, len(decodes), now)
        self.steps.append(step)
        self._in_flight += 1
        self._decode_steps += step.decodes > 0
        self._number += 1
        heappush(self._events, (step.back_s, self._number, step))
        return True

    def _next_decodes(self) -> list[StepSpan]:
        """An equal share of all that decode, as far as their tokens are back."""
        schedule, spans = self._schedule, list[StepSpan]()
        if self._decode_steps >= schedule.micro_batches:
            return spans
        share = min(schedule.batch, -(-self._decoding // schedule.micro_batches))
        for _ in range(min(share, len(self._ready))):
            request = self._ready.popleft()
            context = self._requests[request].prompt_tokens + len(self.token_s[request]) - 1
            spans.append(StepSpan(request, 1, context, True))
        return spans

    def _next_chunks(self, left: int) -> list[StepSpan]:
        """Chunks of `left` tokens together, of the first prompts that are not handed out yet."""
        spans: list[StepSpan] = []
        alone = not self._decoding
        for request in list(self._prefilling):
            done, whole = self._prefilled[request], self._requests[request].prompt_tokens
            stop, room = self._slice(request, left) if alone else (whole, left)
            tokens = min(room, stop - done)
            if tokens < 1:
                break
            spans.append(StepSpan(request, tokens, done, done + tokens == whole))
            self._prefilled[request] += tokens
            left -= tokens
            if done + tokens == whole:
                self._prefilling.remove(request)
                self._decoding += 1
        return spans

    def _slice(self, request: int, left: int) -> tuple[int, int]:
        """The end of a prompt's next slice, and the most tokens the slice may have; a short prompt
        is one slice."""
        schedule, whole = self._schedule, self._requests[request].prompt_tokens
        slices = () if schedule.slices is None else schedule.slices(whole)
        if len(slices) < 2:
            return whole, left
        stop = next(stop for stop in accumulate(slices) if stop > self._prefilled[request])
        return stop, left + max(0, schedule.slice_budget - schedule.token_budget)

    def _served(self, spans: Sequence[StepSpan], decodes: int, now: float) -> ServedStep:
        """The step that begins now, its turn at every station taken."""
        hops, time = self._ring.hops, now
        stage_s: list[tuple[float, float]] = []
        hop_s: list[tuple[float, float]] = []
        tokens, sampled = sum(span.tokens for span in spans), sum(span.sample for span in spans)
        for index, stage in enumerate(self._ring.stages):
            start = max(time, self._stage_free_s[index])
            time = self._stage_free_s[index] = start + checked_seconds(
                stage(spans), f"stages[{index}]"
            )
            stage_s.append((start, time))
            if hops:
                carried = tokens if index < len(hops) - 1 else sampled
                send_s = checked_seconds(hops[index].station_s(carried), f"hops[{index}].station_s")
                start = max(time, self._link_free_s[index])
                self._link_free_s[index] = start + send_s
                hop_s.append((start, start + send_s))
                time = start + send_s + hops[index].latency_s
        return ServedStep(tuple(spans), decodes, now, time, tuple(stage_s), tuple(hop_s))

    def _return(self, step: ServedStep) -> None:
        self._in_flight -= 1
        self._decode_steps -= step.decodes > 0
        for span in step.spans:
            if span.sample:
                times = self.token_s[span.request]
                times.append(step.back_s)
                if len(times) < self._requests[span.request].new_tokens:
                    self._ready.append(span.request)
                else:
                    self._running -= 1
                    self._decoding -= 1


def _result(run: _Run, requests: Sequence[ServedRequest]) -> Serving:
    began = min(request.arrival_s for request in requests)
    span_s = max(times[-1] for times in run.token_s) - began
    tokens = sum(len(times) for times in run.token_s)
    busy = _shares([step.stage_s for step in run.steps], span_s)
    return Serving(
        token_s=tuple(map(tuple, run.token_s)),
        ttft_s=tuple(
            times[0] - request.arrival_s
            for times, request in zip(run.token_s, requests, strict=True)
        ),
        inter_token_s=tuple(
            later - earlier for times in run.token_s for earlier, later in pairwise(times)
        ),
        span_s=span_s,
        tokens_per_s=tokens / span_s if span_s else float("inf"),
        node_utilisation=busy,
        link_utilisation=_shares([step.hop_s for step in run.steps], span_s),
        bubble_share=max(0.0, 1.0 - sum(busy) / len(busy)),
        steps=tuple(run.steps),
    )


def _shares(steps: Sequence[tuple[tuple[float, float], ...]], span_s: float) -> tuple[float, ...]:
    """Share of the run that each station is busy."""
    busy = [sum(end - start for start, end in visits) for visits in zip(*steps, strict=True)]
    return tuple(value / span_s if span_s else 0.0 for value in busy)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of the values, read between two on a line; 0 when there are none."""
    if not 0 <= percent <= 100:
        raise invalid("percent", f"is {percent}; it must be from 0 to 100")
    return float(np.percentile(values, percent)) if values else 0.0
