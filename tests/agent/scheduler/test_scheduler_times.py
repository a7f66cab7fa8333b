"""The scheduler with a computed clock: the times of its steps on stages and links of known cost.

Stages serve steps in the order the head forms them, so that when a step is back follows from the
one before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking, ChunkSizer
from edgeshard_agent.scheduler.scheduler import HeadStep, Limits
from edgeshard_agent.scheduler.slices import PromptSlices

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.deployments.step_cost import Piece, StageCost, compute_s, inter_token_s
from edgeshard.domain.requests.generation import StageTiming, Token
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import HopTimes, Pipeline, SimulatedTraffic, StageTimes
from tests.support.rig import Rig

DECODE_S = 0.017
"""The time to read a stage's weights: the time of a decode step with any batch."""
TOKEN_S = 0.003
"""The time of a prompt's token on one stage."""


def stage(hop_delay_s: float = 0.0005, hop_token_s: float = 2e-6, scale: float = 1.0) -> StageCost:
    rows = (1, 8, 2048)
    decode = tuple(scale * seconds for seconds in (DECODE_S, 1.2 * DECODE_S, 2048 * TOKEN_S))
    prefill = tuple(scale * max(DECODE_S, count * TOKEN_S) for count in rows)
    return StageCost(
        rows, decode, prefill, scale * 1e-7, scale * 1e-7, hop_delay_s, 0.0002, hop_token_s
    )


@dataclass
class Timed:
    """A rig whose steps take their time. `arrivals` are (seconds, name, prompt tokens, new
    tokens)."""

    rig: Rig
    costs: Sequence[StageCost]
    arrivals: Sequence[tuple[float, str, int, int]]
    now: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._compute_free = [0.0] * len(self.costs)
        self._link_free = [0.0] * len(self.costs)
        self._pipe: deque[tuple[float, HeadStep]] = deque()
        self._coming = deque(sorted(self.arrivals))
        self.run()

    def run(self) -> None:
        while self._coming or self._pipe:
            if self._coming and (not self._pipe or self._coming[0][0] <= self._pipe[0][0]):
                self.now, name, prompt, new = self._coming.popleft()
                self.times[name] = []
                self.rig.submit(name, [(len(self.times) + i) % 90 for i in range(prompt)], new)
            else:
                self.now, step = self._pipe.popleft()
                known = len(self.rig.events)
                pieces = _pieces(step)
                timings = [
                    StageTiming(index, 0.0, cost.step_s(pieces))
                    for index, cost in enumerate(self.costs)
                ]
                self.rig.now_s = self.now
                self.rig.take(step, tuple(timings))
                for event in self.rig.events[known:]:
                    if isinstance(event.event, Token):
                        self.times[event.request_id].append(self.now)
            while (formed := self.rig.next_step()) is not None:
                self._pipe.append((self._back_at(formed), formed))

    def _back_at(self, step: HeadStep) -> float:
        pieces = _pieces(step)
        at = self.now
        for index, cost in enumerate(self.costs):
            at = self._compute_free[index] = max(at, self._compute_free[index]) + cost.step_s(
                pieces
            )
            last = index == len(self.costs) - 1
            tokens = sum(span.sample for span in step.plan.spans) if last else step.plan.token_count
            at = self._link_free[index] = max(at, self._link_free[index]) + cost.transfer_s(tokens)
            at += cost.hop_delay_s
        return at

    def gaps(self, name: str) -> list[float]:
        return [after - before for before, after in pairwise(self.times[name])]

    def inter_token_s(self) -> float:
        """Mean over the requests, without the first tokens, while all of them run."""
        means = [sum(gaps) / len(gaps) for name in self.times if (gaps := self.gaps(name)[4:])]
        return sum(means) / len(means)


def _pieces(step: HeadStep) -> list[Piece]:
    return [(span.first_position, span.token_count) for span in step.plan.spans]


def simulated(costs: Sequence[StageCost], batch: int, micro_batches: int, mode: Mode) -> float:
    """The time between two tokens that the planner's simulator expects."""

    def times(cost: StageCost) -> StageTimes:
        return StageTimes(
            lambda t, c: cost.step_s([(c, t)]), lambda b, c: cost.step_s([(c, 1)] * b)
        )

    stages = tuple(times(cost) for cost in costs)
    hops = tuple(HopTimes(cost.transfer_s, cost.hop_delay_s) for cost in costs)
    traffic = SimulatedTraffic(
        batch, micro_batches, prompt_tokens=4, new_tokens=40, decode_only=True
    )
    return simulate(Pipeline(stages, hops), traffic, mode).inter_token_s


def decode_run(
    make_rig: type[Rig], costs: Sequence[StageCost], mode: Mode, batch: int, micro_batches: int
) -> Timed:
    window = max(len(costs), micro_batches)
    rig = make_rig(
        blocks=2000, limits=Limits(4200, 100), chunking=Chunking(512),
        batching=Batching(mode, window, batch, micro_batches),
    )  # fmt: skip
    return Timed(
        rig, costs, [(0.0, f"r{number}", 4, 40) for number in range(batch * micro_batches)]
    )


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", [Mode.BUBBLES, Mode.NO_BUBBLES])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 1.6), (1.0, 0.7, 1.2)], ids=str)
def test_decoding_takes_what_the_planners_simulator_says(
    make_rig: type[Rig], scales: tuple[float, ...], mode: Mode, micro_batches: int
) -> None:
    costs = [stage(scale=scale) for scale in scales]
    timed = decode_run(make_rig, costs, mode, 8, micro_batches)
    assert timed.inter_token_s() == pytest.approx(
        simulated(costs, 8, micro_batches, mode), rel=0.05
    )


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_no_bubbles_is_faster_than_bubbles(make_rig: type[Rig], micro_batches: int) -> None:
    costs = [stage(), stage()]
    with_bubbles = decode_run(make_rig, costs, Mode.BUBBLES, 4, micro_batches).inter_token_s()
    assert (
        decode_run(make_rig, costs, Mode.NO_BUBBLES, 4, micro_batches).inter_token_s()
        < 0.9 * with_bubbles
    )


def test_two_micro_batches_over_two_stages_reach_their_rate(make_rig: type[Rig]) -> None:
    """m b / max(R, m B): the round and the busiest stage's turns."""
    costs = [stage(), stage()]
    timed = decode_run(make_rig, costs, Mode.NO_BUBBLES, 8, 2)
    theory = inter_token_s(costs, [(20, 1)] * 8, in_flight=2)
    assert timed.inter_token_s() <= theory / 0.98


def test_few_streams_are_as_fast_as_the_ring_is_round(make_rig: type[Rig]) -> None:
    costs = [stage(), stage()]
    for streams in (1, 2):
        rig = make_rig(
            blocks=200,
            limits=Limits(400, 9),
            chunking=Chunking(512),
            batching=Batching(Mode.NO_BUBBLES, 2, 8, 2),
        )
        timed = Timed(rig, costs, [(0.0, f"r{number}", 4, 40) for number in range(streams)])
        assert timed.inter_token_s() == pytest.approx(
            inter_token_s(costs, [(20, 1)], in_flight=1), rel=0.02
        )


LIMIT_S = 0.25


def long_prompt_run(
    make_rig: type[Rig],
    streams: int,
    limit_s: float | None = LIMIT_S,
    scale: float = 1.0,
    told: bool = True,
) -> Timed:
    """A prompt of 4,096 tokens that arrives after 2 s, among streams that decode all the while.

    Stages take `scale` times as long as the head expects; `told` is whether it gets the stages'
    times.
    """
    profile, costs = [stage(), stage()], [stage(scale=scale), stage(scale=scale)]
    chunking = Chunking(
        512, max_inter_token_latency_s=limit_s, inter_token_s=partial(inter_token_s, profile),
        compute_s=partial(compute_s, profile) if told else None,
    )  # fmt: skip
    rig = make_rig(
        blocks=1200, block_tokens=16, limits=Limits(4600, 100), chunking=chunking,
        batching=Batching(Mode.NO_BUBBLES, 2, 8, 2),
    )  # fmt: skip
    arrivals = [(0.0, f"r{number}", 8, 400) for number in range(streams)]
    return Timed(rig, costs, [*arrivals, (2.0, "long", 4096, 2)])


def test_a_long_prompt_keeps_nobody_from_decoding(make_rig: type[Rig]) -> None:
    timed = long_prompt_run(make_rig, 8)
    gaps = sorted(gap for name in timed.times if name != "long" for gap in timed.gaps(name))
    assert gaps[int(0.99 * len(gaps))] <= LIMIT_S and gaps[-1] <= 1.25 * LIMIT_S
    assert any(gap > 0.7 * LIMIT_S for gap in gaps), "the limit was used"
    sizes = [
        span.token_count
        for step in timed.rig.steps
        for span in step.plan.spans
        if span.request == 8
    ]
    alone_s = sum(stage().step_s([(sum(sizes[:i]), size)]) for i, size in enumerate(sizes))
    assert timed.times["long"][0] - 2.0 <= 2 * alone_s


def test_nodes_slower_than_their_profile_get_smaller_chunks(make_rig: type[Rig]) -> None:
    timed, deaf = (long_prompt_run(make_rig, 8, scale=1.5, told=told) for told in (True, False))
    gaps, longer = (
        sorted(gap for name in run.times if name != "long" for gap in run.gaps(name))
        for run in (timed, deaf)
    )
    assert gaps[int(0.99 * len(gaps))] <= LIMIT_S and gaps[-1] <= 1.25 * LIMIT_S
    assert longer[int(0.99 * len(longer))] > 1.25 * LIMIT_S
    assert any(gap > 0.7 * LIMIT_S for gap in gaps), "the limit was used"


def test_a_slow_moment_is_forgotten() -> None:
    chunks = ChunkSizer(
        Chunking(512, max_inter_token_latency_s=0.1, inter_token_s=lambda p, _: 0.001 * p[-1][1],
                 compute_s=lambda p: 0.001 * p[-1][1]), window=1,
    )  # fmt: skip

    def step(slower: float) -> int:
        length = chunks.length([(5, 1)], 1, 0, 4096, True)
        chunks.formed([(5, 1), (0, length)], length)
        chunks.returned(slower * 0.001 * length)
        return length

    assert [step(1.0) for _ in range(4)][-1] == 100
    step(2.0)
    assert step(1.0) == 50
    assert 90 < [step(1.0) for _ in range(100)][-1] <= 100
    step(1000.0)
    assert step(1.0) == 25, "no more than fourfold is believed"


def test_without_a_limit_a_chunk_is_what_holds_the_others_up(make_rig: type[Rig]) -> None:
    timed = long_prompt_run(make_rig, 8, limit_s=None)
    gaps = [gap for name in timed.times if name != "long" for gap in timed.gaps(name)]
    assert LIMIT_S < max(gaps) < 3.1 * 512 * TOKEN_S, (
        "never the whole prompt, which takes 12 s a stage"
    )


@pytest.mark.parametrize(("stages", "share"), [(2, 0.6), (3, 0.5)])
def test_a_sliced_prompt_comes_through_sooner(
    make_rig: type[Rig], stages: int, share: float
) -> None:
    costs = [stage() for _ in range(stages)]
    slices = PromptSlices(costs)
    slices.prepare(4096)
    ttft = []
    for chosen in (slices, None):
        chunking = Chunking(8192, max_step_tokens=8192, slices=chosen)
        rig = make_rig(
            blocks=300, block_tokens=16, limits=Limits(4600, 9), chunking=chunking,
            batching=Batching(Mode.NO_BUBBLES, stages, 1, 1),
        )  # fmt: skip
        ttft.append(Timed(rig, costs, [(0.0, "r", 4096, 2)]).times["r"][0])
    assert ttft[0] <= share * ttft[1]
