"""A discrete-event simulation of a pipeline ring: from stage and hop times to the latencies of
users. Pure.

A step passes compute, link, compute, ..., return in order. Each is a station that serves one step
at a time, first come first served; after a link's station the frame travels for the pure latency.
If sending is asynchronous, a node's compute, uplink and downlink are separate stations; otherwise a
node's compute and its sends are one. In a ring a node has one uplink and one downlink, so a hop is
one station for both. Slices of a prompt follow each other through the stages; only the last one
returns. With the head on the source, its node serves first-stage work before head work.
(docs/papers.md#simulation)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from edgeshard.domain.deployments.placement import Mode
from edgeshard.planning.simulation.timing import Pipeline, SimulatedTraffic, Visit, checked_seconds

_ARRIVAL, _WAKE = 0, 1
"""At equal times arrivals precede a station's choice of its next step, so that it sees all that
wait."""


class _Raw(NamedTuple):
    """A visit as the loop notes it: its position on the path instead of names."""

    position: int
    micro_batch: int
    token: int
    piece: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The outcome of a run. Times are seconds from the start, when all requests are there."""

    mode: Mode
    token_s: tuple[tuple[float, ...], ...]
    """[micro-batch][token] when the token is back at the first stage."""
    makespan_s: float
    ttft_s: float
    """Time to the first token, the mean over requests."""
    worst_ttft_s: float
    """Time to the first token of the last request."""
    inter_token_s: float
    """Mean time between two tokens of a sequence; 0 when there is only one."""
    time_per_token_s: float
    """A sequence's whole time over its tokens, the mean over requests."""
    tokens_per_s: float
    """All tokens over the makespan."""
    node_utilisation: tuple[float, ...]
    """Share of the makespan that a node's station is busy, by stage."""
    link_utilisation: tuple[float, ...]
    """The same of the hops, the return last."""
    bubble_s: tuple[float, ...]
    """Seconds that a stage does not compute, by stage."""
    bubble_share: float
    """Share of these seconds in all stages' time."""
    _path: _Path = field(repr=False)
    _visits: list[_Raw] = field(repr=False, compare=False)

    @property
    def timeline(self) -> list[Visit]:
        """Every service, in the order of its start."""
        return sorted(self._path.named(self._visits), key=lambda visit: visit.start_s)


def simulate(
    pipeline: Pipeline, traffic: SimulatedTraffic, mode: Mode = Mode.NO_BUBBLES
) -> Simulation:
    """Run the traffic through the ring. Raises InvalidArgumentError naming the field that cannot
    be."""
    pipeline.check()
    traffic.check()
    path = _Path.build(pipeline, traffic)
    run = _Run(path, traffic, mode)
    run.run()
    return _result(path, traffic, run, mode)


@dataclass(frozen=True, slots=True)
class _Path:
    """The stations a step passes, one position after the other, with the seconds of every kind of
    step at each.

    hold_s[row][position] is the time that the station is occupied. Row k < slices is the prompt's
    slice k, row slices + t the decode step t. send_s is the sending part of it (all of it on a
    link, the end of it on a node that sends itself). `last_stage` is the position at which all
    other slices than the last end.
    """

    nodes: tuple[str, ...]
    links: tuple[str, ...]
    stations: tuple[str, ...]
    station: tuple[int, ...]
    stage: tuple[int | None, ...]
    link: tuple[int | None, ...]
    is_head: tuple[bool, ...]
    latency_s: tuple[float, ...]
    hold_s: list[list[float]]
    send_s: list[list[float]]
    pieces: int
    decode_only: bool
    last_stage: int
    shared: bool

    @classmethod
    def build(cls, pipeline: Pipeline, traffic: SimulatedTraffic) -> _Path:
        count = len(pipeline.stages)
        hops = len(pipeline.hops)
        separate = pipeline.asynchronous
        nodes, links = pipeline.node_names, pipeline.link_names
        stops: list[tuple[int, int | None, int | None, float, bool]] = []
        for index in range(count):
            delay = pipeline.hops[index].latency_s if index < hops else 0.0
            joined = index < hops and not separate
            stops.append((index, index, index if joined else None, delay if joined else 0.0, False))
            if index < hops and separate:
                stops.append((count + index, None, index, delay, False))
        if pipeline.head_s is not None:
            stops.append((0, 0, None, 0.0, True))
        station, stage, link, latency, headed = zip(*stops, strict=True)
        hold, send = _tables(pipeline, traffic, stage, link, headed)
        return cls(
            nodes=nodes,
            links=links,
            stations=(*nodes, *links) if separate else nodes,
            station=station,
            stage=stage,
            link=link,
            is_head=headed,
            latency_s=latency,
            hold_s=hold,
            send_s=send,
            pieces=0 if traffic.decode_only else len(traffic.pieces),
            decode_only=traffic.decode_only,
            last_stage=max(
                at for at, index in enumerate(stage) if index == count - 1 and not headed[at]
            ),
            shared=pipeline.head_s is not None,
        )

    def row(self, token: int, piece: int) -> int:
        """Row of the tables. Token 0 is made by the prompt's last slice, unless nothing is
        prefilled."""
        if self.decode_only:
            return token
        return piece if token == 0 else self.pieces + token - 1

    def named(self, visits: list[_Raw]) -> list[Visit]:
        """Visits with the names of stations. A node that sends itself has two: its compute, then
        its send."""
        station_visits = []
        for position, micro_batch, token, piece, start, end in visits:
            stage, link = self.stage[position], self.link[position]
            split = end
            if link is not None:
                split = max(start, end - self.send_s[self.row(token, piece)][position])
            if stage is not None:
                kind = "decode" if token or self.decode_only else "prefill"
                kind = "head" if self.is_head[position] else kind
                name = self.nodes[stage]
                station_visits.append(
                    Visit(
                        name,
                        micro_batch,
                        kind,
                        token,
                        start,
                        split if link is not None else end,
                        piece,
                    )
                )
            returns = link is not None and link == len(self.links) - 1
            if link is None or (returns and self.pieces and token == 0 and piece < self.pieces - 1):
                continue
            name = self.stations[self.station[position]]
            station_visits.append(
                Visit(name, micro_batch, "return" if returns else "send", token, split, end, piece)
            )
        return station_visits


def _tables(
    pipeline: Pipeline,
    traffic: SimulatedTraffic,
    stage: Sequence[int | None],
    link: Sequence[int | None],
    headed: Sequence[bool],
) -> tuple[list[list[float]], list[list[float]]]:
    """hold_s and send_s of a path."""
    batch, prompt = traffic.batch, traffic.prompt_tokens
    last_link = len(pipeline.hops) - 1
    hold, send = [], []

    def row(phase: str, tokens: int, context: int, returns: bool) -> None:
        computed = [
            checked_seconds(
                getattr(item, phase)(tokens, context) + item.overhead_s, f"stages[{index}].{phase}"
            )
            for index, item in enumerate(pipeline.stages)
        ]
        # A slice that does not return never gets to the last link and the head.
        send_s = [
            0.0
            if index is None or (index == last_link and not returns)
            else _hop_s(pipeline, index, tokens, batch)
            for index in link
        ]
        head = (
            0.0
            if pipeline.head_s is None or not returns
            else checked_seconds(pipeline.head_s(batch), "head_s")
        )
        work = [
            head if is_head else (0.0 if index is None else computed[index])
            for index, is_head in zip(stage, headed, strict=True)
        ]
        hold.append([a + b for a, b in zip(work, send_s, strict=True)])
        send.append(send_s)

    context = 0
    for number, length in enumerate(() if traffic.decode_only else traffic.pieces):
        row("prefill_s", batch * length, context, returns=number == len(traffic.pieces) - 1)
        context += length
    for token in range(0 if traffic.decode_only else 1, traffic.new_tokens):
        context = prompt + token if traffic.decode_only else prompt + token - 1
        row("decode_s", batch, context, returns=True)
    return hold, send


def _hop_s(pipeline: Pipeline, index: int, tokens: int, batch: int) -> float:
    """Seconds on a link. The return carries one position of each sequence, however long the step
    was."""
    carried = batch if index == len(pipeline.hops) - 1 else tokens
    return checked_seconds(pipeline.hops[index].station_s(carried), f"hops[{index}].station_s")


class _Run:
    """The event loop. An event is (time, arrival or wake, number, position, micro-batch, token,
    piece)."""

    def __init__(self, path: _Path, traffic: SimulatedTraffic, mode: Mode) -> None:
        self._path = path
        self._traffic = traffic
        self._mode = mode
        self._events: list[tuple[float, int, int, int, int, int, int]] = []
        self._number = 0
        self._free_s = [0.0] * len(path.stations)
        self._waiting: tuple[deque[tuple[int, int, int, int]], deque[tuple[int, int, int, int]]] = (
            deque(),
            deque(),
        )
        self._awake = False
        self._back = 0
        self.visits: list[_Raw] = []
        self.token_s: list[list[float]] = [[] for _ in range(traffic.micro_batches)]

    def run(self) -> None:
        together = 1 if self._mode is Mode.SEQUENTIAL else self._traffic.micro_batches
        for micro_batch in range(together):
            self._begin(0.0, micro_batch, 0)
        path = self._path
        free = self._free_s
        events = self._events
        shared = self._path.shared
        station = path.station
        while events:
            now, kind, _, position, micro_batch, token, piece = heappop(events)
            if kind == _WAKE:
                self._serve_shared(now)
            elif shared and station[position] == 0:
                self._queue_shared(now, position, micro_batch, token, piece)
            else:
                # There is one queue and arrivals are in time order, so the start is known on
                # arrival: no second event.
                start = free[station[position]]
                self._serve(now if now > start else start, position, micro_batch, token, piece)

    def _begin(self, now: float, micro_batch: int, token: int) -> None:
        """Bring a token's step to the first stage; for a prompt all its slices."""
        for piece in range(max(1, self._path.pieces) if token == 0 else 1):
            self._push(now, _ARRIVAL, 0, micro_batch, token, piece)

    def _push(
        self, time: float, kind: int, position: int, micro_batch: int, token: int, piece: int
    ) -> None:
        self._number += 1
        heappush(self._events, (time, kind, self._number, position, micro_batch, token, piece))

    def _serve(self, start: float, position: int, micro_batch: int, token: int, piece: int) -> None:
        path = self._path
        end = start + path.hold_s[path.row(token, piece)][position]
        self._free_s[path.station[position]] = end
        self.visits.append(_Raw(position, micro_batch, token, piece, start, end))
        arrives = end + path.latency_s[position]
        if token == 0 and piece < path.pieces - 1 and position == path.last_stage:
            return
        if position + 1 < len(path.station):
            self._push(arrives, _ARRIVAL, position + 1, micro_batch, token, piece)
        else:
            self._token_back(arrives, micro_batch, token)

    def _token_back(self, now: float, micro_batch: int, token: int) -> None:
        self.token_s[micro_batch].append(now)
        more, count = token + 1 < self._traffic.new_tokens, self._traffic.micro_batches
        if self._mode is Mode.BUBBLES:
            self._back += 1
            if self._back == count:
                self._back = 0
                for each in range(count if more else 0):
                    self._begin(now, each, token + 1)
        elif more:
            self._begin(now, micro_batch, token + 1)
        elif self._mode is Mode.SEQUENTIAL and micro_batch + 1 < count:
            self._begin(now, micro_batch + 1, 0)

    def _queue_shared(
        self, now: float, position: int, micro_batch: int, token: int, piece: int
    ) -> None:
        self._waiting[self._path.is_head[position]].append((position, micro_batch, token, piece))
        if not self._awake:
            self._awake = True
            self._push(max(now, self._free_s[0]), _WAKE, 0, 0, 0, 0)

    def _serve_shared(self, now: float) -> None:
        """Serve the first stage's work before the head's: other orders lose throughput."""
        first, head = self._waiting
        position, micro_batch, token, piece = (first or head).popleft()
        self._serve(now, position, micro_batch, token, piece)
        self._awake = bool(first or head)
        if self._awake:
            self._push(self._free_s[0], _WAKE, 0, 0, 0, 0)


def _result(path: _Path, traffic: SimulatedTraffic, run: _Run, mode: Mode) -> Simulation:
    times = run.token_s
    count, tokens = traffic.micro_batches, traffic.new_tokens
    makespan = max(row[-1] for row in times)
    node_busy, link_busy = [0.0] * len(path.nodes), [0.0] * len(path.links)
    working = [0.0] * len(path.nodes)
    for hold, send in zip(path.hold_s, path.send_s, strict=True):
        for stage, link, hold_s, send_s in zip(path.stage, path.link, hold, send, strict=True):
            if stage is not None:
                node_busy[stage] += count * hold_s
                working[stage] += count * (hold_s - send_s)
            if link is not None:
                link_busy[link] += count * send_s
    bubbles = tuple(max(0.0, makespan - value) for value in working)
    span = makespan or 1.0  # nothing takes any time: nothing is busy either
    gaps = tokens - 1
    return Simulation(
        mode=mode,
        token_s=tuple(tuple(row) for row in times),
        makespan_s=makespan,
        ttft_s=sum(row[0] for row in times) / count,
        worst_ttft_s=max(row[0] for row in times),
        inter_token_s=sum(row[-1] - row[0] for row in times) / (count * gaps) if gaps else 0.0,
        time_per_token_s=sum(row[-1] for row in times) / (count * tokens),
        tokens_per_s=traffic.tokens / makespan if makespan else float("inf"),
        node_utilisation=tuple(value / span for value in node_busy),
        link_utilisation=tuple(value / span for value in link_busy),
        bubble_s=bubbles,
        bubble_share=sum(bubbles) / (span * len(bubbles)),
        _path=path,
        _visits=run.visits,
    )
