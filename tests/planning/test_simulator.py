"""The simulator against closed formulas, against the rules of a ring (as properties), and against
bad input."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.made_rings import linear_hop, steady_stage
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.simulation.simulator import Simulation, simulate
from edgeshard.planning.simulation.timing import (
    HopTimes,
    Pipeline,
    SimulatedTraffic,
    StageTimes,
    Visit,
)
from tests.planning.oracles.time_table import TimeTable


def tandem(seed: int, stages: int) -> Pipeline:
    """A random asynchronous ring with prefill, decode, hop and return times of their own."""
    rng = np.random.default_rng(seed)
    return Pipeline(
        stages=tuple(
            steady_stage(float(rng.uniform(0.05, 0.4)), float(rng.uniform(0.002, 0.03)))
            for _ in range(stages)
        ),
        hops=tuple(
            linear_hop(float(rng.uniform(1e-4, 3e-3)), latency_s=float(rng.uniform(0, 0.02)))
            for _ in range(stages if stages > 1 else 0)
        ),
    )


def round_and_bottleneck(
    pipeline: Pipeline, traffic: SimulatedTraffic, prefill: bool
) -> tuple[float, float]:
    """R and B of one micro-batch's step by hand: sums and the busiest station."""
    tokens = traffic.batch * (traffic.prompt_tokens if prefill else 1)
    stations = [
        stage.prefill_s(tokens, 0) if prefill else stage.decode_s(traffic.batch, 0)
        for stage in pipeline.stages
    ]
    last = len(pipeline.hops) - 1
    stations += [
        hop.station_s(traffic.batch if i == last else tokens) for i, hop in enumerate(pipeline.hops)
    ]
    return sum(stations) + sum(hop.latency_s for hop in pipeline.hops), max(stations)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.one_in(3)
def test_decode_rates_are_those_of_the_formulas(seed: int) -> None:
    stages, micro_batches = seed % 6 + 1, (1, 2, 3, 5, 8, 12)[(seed * 7) % 6]
    pipeline = tandem(seed, stages)
    traffic = SimulatedTraffic(
        batch=2, micro_batches=micro_batches, prompt_tokens=8, new_tokens=500, decode_only=True
    )
    round_s, busiest_s = round_and_bottleneck(pipeline, traffic, prefill=False)
    in_flight = 2 * micro_batches
    rate = simulate(pipeline, traffic, Mode.NO_BUBBLES).tokens_per_s
    assert rate == pytest.approx(in_flight / max(round_s, micro_batches * busiest_s), rel=0.01)
    rate = simulate(pipeline, traffic, Mode.BUBBLES).tokens_per_s
    assert rate == pytest.approx(in_flight / (round_s + (micro_batches - 1) * busiest_s), rel=0.01)
    assert simulate(pipeline, traffic, Mode.SEQUENTIAL).tokens_per_s == pytest.approx(
        2 / round_s, rel=0.01
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_with_its_prompts_takes_the_two_phases_time(seed: int) -> None:
    pipeline = tandem(seed + 100, seed % 5 + 2)
    traffic = SimulatedTraffic(
        batch=4, micro_batches=(1, 2, 4, 8)[seed % 4], prompt_tokens=64, new_tokens=400
    )
    m = traffic.micro_batches
    prefill_s, prefill_busiest_s = round_and_bottleneck(pipeline, traffic, prefill=True)
    decode_s, decode_busiest_s = round_and_bottleneck(pipeline, traffic, prefill=False)
    whole = (
        prefill_s
        + (m - 1) * prefill_busiest_s
        + (traffic.new_tokens - 1) * max(decode_s, m * decode_busiest_s)
    )
    assert simulate(pipeline, traffic).tokens_per_s == pytest.approx(
        traffic.tokens / whole, rel=0.01
    )


@pytest.mark.parametrize(("devices", "tokens"), [(2, 5), (4, 9), (6, 3)])
def test_bubble_times_are_the_papers_in_its_ideal_setting(devices: int, tokens: int) -> None:
    """Equal stages, free links, as many micro-batches as devices; the paper counts the G - 1 decode
    iterations."""
    slowest = 0.5
    pipeline = Pipeline((steady_stage(1.0, slowest),) * devices, (linear_hop(0.0),) * devices)
    traffic = SimulatedTraffic(micro_batches=devices, new_tokens=tokens - 1, decode_only=True)
    bubbles = simulate(pipeline, traffic, Mode.BUBBLES)
    assert bubbles.bubble_s == pytest.approx([(devices - 1) * slowest * (tokens - 1)] * devices)
    no_bubbles = simulate(pipeline, traffic, Mode.NO_BUBBLES)
    assert no_bubbles.bubble_s == pytest.approx([(devices - 1) * slowest] * devices)


def test_eight_slices_over_three_equal_stages_halve_the_time_to_the_first_token() -> None:
    whole_s = 8.0
    stage = StageTimes(lambda tokens, context: whole_s * tokens / 64, lambda batch, context: 0.1)
    pipeline = Pipeline((stage,) * 3, (linear_hop(0.0, latency_s=0.01),) * 3)
    whole = simulate(pipeline, SimulatedTraffic(prompt_tokens=64, new_tokens=1)).ttft_s
    sliced = simulate(
        pipeline, SimulatedTraffic(prompt_tokens=64, new_tokens=1, slices=(8,) * 8)
    ).ttft_s
    assert whole == pytest.approx(3 * whole_s + 0.03)
    assert sliced == pytest.approx(10 / 24 * 3 * whole_s + 0.03)
    assert sliced <= 0.5 * whole


def test_slices_and_tokens_see_the_context_before_them() -> None:
    prefills: list[tuple[int, int]] = []
    decodes: list[tuple[int, int]] = []

    def prefill_s(tokens: int, context: int) -> float:
        prefills.append((tokens, context))
        return 1.0

    def decode_s(batch: int, context: int) -> float:
        decodes.append((batch, context))
        return 1.0

    traffic = SimulatedTraffic(batch=2, prompt_tokens=10, new_tokens=3, slices=(5, 3, 2))
    simulate(Pipeline((StageTimes(prefill_s, decode_s),)), traffic)
    assert prefills == [(10, 0), (6, 5), (4, 8)]
    assert decodes == [(2, 10), (2, 11)]


def test_without_asynchronous_sends_a_node_computes_and_sends_in_turn() -> None:
    stages, hops = (steady_stage(1.0, 0.3),) * 2, (linear_hop(0.2),) * 2
    traffic = SimulatedTraffic(micro_batches=6, prompt_tokens=1, new_tokens=600, decode_only=True)
    together = simulate(Pipeline(stages, hops, asynchronous=False), traffic)
    assert together.tokens_per_s == pytest.approx(1 / 0.5, rel=0.01)
    assert simulate(Pipeline(stages, hops), traffic).tokens_per_s == pytest.approx(
        1 / 0.3, rel=0.01
    )
    kinds = {visit.kind for visit in together.timeline if visit.station == "stage 1"}
    assert kinds == {"decode", "return"}


def test_a_head_on_the_source_serves_the_first_stage_first() -> None:
    """R = 0.4 + 0.5 + 0.3 + free hops; the source's station holds 0.7 for each token."""
    pipeline = Pipeline(
        (steady_stage(1.0, 0.4), steady_stage(1.0, 0.5)),
        (linear_hop(0.0),) * 2,
        head_s=lambda batch: 0.3,
    )
    alone = simulate(pipeline, SimulatedTraffic(new_tokens=50, decode_only=True))
    assert alone.inter_token_s == pytest.approx(1.2)
    full = simulate(pipeline, SimulatedTraffic(micro_batches=4, new_tokens=400, decode_only=True))
    assert full.tokens_per_s == pytest.approx(1 / 0.7, rel=0.01)
    source = [visit for visit in full.timeline if visit.station == "stage 0"]
    assert [visit.kind for visit in source[:4]] == [
        "decode"
    ] * 4  # all there at once: no head work between them


def test_a_single_stage_has_no_links() -> None:
    result = simulate(
        Pipeline((steady_stage(0.5, 0.1, overhead_s=0.01),)),
        SimulatedTraffic(batch=2, new_tokens=11),
    )
    assert result.ttft_s == pytest.approx(0.51)
    assert result.inter_token_s == pytest.approx(0.11)
    assert result.tokens_per_s == pytest.approx(22 / (0.51 + 10 * 0.11))
    assert result.time_per_token_s == pytest.approx((0.51 + 10 * 0.11) / 11)
    assert result.link_utilisation == ()
    assert result.node_utilisation == pytest.approx([1.0])
    assert result.bubble_share == pytest.approx(0.0)


def test_latency_delays_but_occupies_nothing() -> None:
    pipeline = Pipeline((steady_stage(1.0, 0.1),) * 2, (linear_hop(0.0, latency_s=1.0),) * 2)
    one = simulate(pipeline, SimulatedTraffic(new_tokens=100, decode_only=True))
    many = simulate(pipeline, SimulatedTraffic(micro_batches=20, new_tokens=100, decode_only=True))
    assert many.tokens_per_s == pytest.approx(20 * one.tokens_per_s, rel=0.02)
    assert many.link_utilisation == (0.0, 0.0)


def test_times_are_read_between_the_measured_points() -> None:
    table = TimeTable((1, 3), (0, 10), ((1.0, 2.0), (3.0, 6.0)))
    table.check()
    assert [table(1, 0), table(3, 10), table(2, 0), table(2, 5), table(5, 0)] == [
        1.0,
        6.0,
        2.0,
        3.0,
        5.0,
    ]
    assert TimeTable((4,), (7,), ((2.0,),))(100, 100) == 2.0
    assert TimeTable((1, 2), (0,), ((0.0,), (1.0,)))(0, 0) == 0.0


# The invariants of every ring and traffic.

seconds = st.floats(0, 2, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def cases(draw: st.DrawFn, head: bool = True) -> tuple[Pipeline, SimulatedTraffic]:
    count = draw(st.integers(1, 5))
    stages = []
    for _ in range(count):
        per_token, growth, decode, overhead = (draw(seconds) for _ in range(4))
        stages.append(
            StageTimes(
                partial(
                    lambda a, g, tokens, context: tokens * (a + 0.01 * g * context),
                    per_token,
                    growth,
                ),
                partial(
                    lambda d, g, batch, context: batch * (d + 0.01 * g * context), decode, growth
                ),
                overhead,
            )
        )
    hops = [
        linear_hop(draw(seconds), draw(seconds), draw(seconds))
        for _ in range(count if count > 1 else 0)
    ]
    headed = draw(seconds) if head and count > 1 and draw(st.booleans()) else None
    pipeline = Pipeline(
        tuple(stages),
        tuple(hops),
        draw(st.booleans()),
        None if headed is None else (lambda batch: headed),
    )
    slices = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    return pipeline, SimulatedTraffic(
        batch=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 5)),
        prompt_tokens=sum(slices),
        new_tokens=draw(st.integers(1, 5)),
        slices=draw(st.sampled_from([slices, ()])),
        decode_only=draw(st.booleans()),
    )


def close(limit: float) -> float:
    return limit + 1e-9 * (1 + abs(limit))


@settings(max_examples=200, deadline=None)
@given(cases(head=False))
def test_no_bubbles_is_never_slower_than_bubbles_nor_that_than_sequential(
    case: tuple[Pipeline, SimulatedTraffic],
) -> None:
    spans = [
        simulate(*case, mode).makespan_s
        for mode in (Mode.NO_BUBBLES, Mode.BUBBLES, Mode.SEQUENTIAL)
    ]
    assert spans[0] <= close(spans[1])
    assert spans[1] <= close(spans[2])


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(Mode))
def test_nothing_is_lost_repeated_or_served_twice_at_once(
    case: tuple[Pipeline, SimulatedTraffic], mode: Mode
) -> None:
    pipeline, traffic = case
    result = simulate(pipeline, traffic, mode)
    timeline = result.timeline
    check_stations(timeline)
    check_passages(pipeline, traffic, timeline)
    for row in result.token_s:
        assert len(row) == traffic.new_tokens
        assert list(row) == sorted(row)
    check_figures(result)


def check_stations(timeline: list[Visit]) -> None:
    by_station: dict[str, list[Visit]] = defaultdict(list)
    for visit in timeline:
        assert visit.end_s >= visit.start_s
        by_station[visit.station].append(visit)
    for visits in by_station.values():
        spans = sorted((visit.start_s, visit.end_s) for visit in visits)
        for (_, end), (start, _) in pairwise(spans):
            assert end <= close(start)


def check_passages(pipeline: Pipeline, traffic: SimulatedTraffic, timeline: list[Visit]) -> None:
    """Every step of every micro-batch is at each of its stations once, in order, and a token after
    the one before."""
    nodes = pipeline.node_names
    links = pipeline.link_names if pipeline.asynchronous else nodes
    steps: dict[tuple[int, int, int], list[Visit]] = defaultdict(list)
    for visit in timeline:
        steps[visit.micro_batch, visit.token, visit.piece].append(visit)
    pieces = 1 if traffic.decode_only else len(traffic.pieces)
    wanted = {
        (micro_batch, token, piece)
        for micro_batch in range(traffic.micro_batches)
        for token in range(traffic.new_tokens)
        for piece in range(pieces if token == 0 else 1)
    }
    assert set(steps) == wanted
    last_end: dict[tuple[int, int], float] = defaultdict(float)
    for (micro_batch, token, piece), visits in sorted(steps.items()):
        kind = "decode" if token or traffic.decode_only else "prefill"
        places = path(
            nodes, links, kind, pipeline.head_s is not None, token == 0 and piece < pieces - 1
        )
        visits.sort(key=lambda visit: places.index((visit.station, visit.kind)))
        assert [(visit.station, visit.kind) for visit in visits] == places
        for place, (before, after) in enumerate(pairwise(visits)):
            delay = (
                pipeline.hops[place // 2].latency_s if before.kind in ("send", "return") else 0.0
            )
            assert before.end_s + delay <= close(after.start_s)
        # slices and tokens of a micro-batch keep their order at each place
        for place, visit in enumerate(visits):
            assert last_end[micro_batch, place] <= close(visit.start_s)
            last_end[micro_batch, place] = visit.end_s


def path(
    nodes: tuple[str, ...], links: tuple[str, ...], kind: str, head: bool, ends_early: bool
) -> list[tuple[str, str]]:
    """(station, kind) of a step, in order; a slice that `ends_early` stops at the last stage."""
    last = len(nodes) - 1
    found = []
    for stage, node in enumerate(nodes):
        found.append((node, kind))
        if last and not (ends_early and stage == last):
            found.append((links[stage], "return" if stage == last else "send"))
    return [*found, (nodes[0], "head")] if head and not ends_early else found


def check_figures(result: Simulation) -> None:
    assert 0 <= result.bubble_share <= close(1.0)
    for share in (*result.node_utilisation, *result.link_utilisation):
        assert 0 <= share <= close(1.0)
    busy: dict[str, float] = defaultdict(float)
    for visit in result.timeline:
        if visit.kind in ("prefill", "decode", "head"):
            busy[visit.station] += visit.end_s - visit.start_s
    for index, bubble in enumerate(result.bubble_s):
        name = f"stage {index}"
        assert bubble == pytest.approx(
            result.makespan_s - busy[name], abs=1e-6 * (1 + result.makespan_s)
        )
    assert result.ttft_s <= close(result.worst_ttft_s) <= close(close(result.makespan_s))
    assert result.makespan_s == max(row[-1] for row in result.token_s)


@pytest.mark.parametrize(
    ("pipeline", "traffic", "field"),
    [
        (Pipeline(()), SimulatedTraffic(), "stages"),
        (Pipeline((steady_stage(1, 1),) * 2), SimulatedTraffic(), "hops"),
        (Pipeline((steady_stage(1, 1),), (linear_hop(0),)), SimulatedTraffic(), "hops"),
        (Pipeline((steady_stage(1, 1),), names=("a", "b")), SimulatedTraffic(), "names"),
        (
            Pipeline((steady_stage(1, 1, overhead_s=-1),)),
            SimulatedTraffic(),
            "stages[0].overhead_s",
        ),
        (
            Pipeline((steady_stage(1, 1),) * 2, (HopTimes(lambda n: 0, float("nan")),) * 2),
            SimulatedTraffic(),
            "hops[0].latency_s",
        ),
        (Pipeline((steady_stage(float("nan"), 1),)), SimulatedTraffic(), "stages[0].prefill_s"),
        (Pipeline((steady_stage(1, -1),)), SimulatedTraffic(), "stages[0].decode_s"),
        (
            Pipeline((steady_stage(1, 1),) * 2, (HopTimes(lambda n: -1.0),) * 2),
            SimulatedTraffic(),
            "hops[0].station_s",
        ),
        (Pipeline((steady_stage(1, 1),)), SimulatedTraffic(micro_batches=0), "micro_batches"),
        (
            Pipeline((steady_stage(1, 1),)),
            SimulatedTraffic(prompt_tokens=8, slices=(4, 3)),
            "slices",
        ),
        (
            Pipeline((steady_stage(1, 1),)),
            SimulatedTraffic(prompt_tokens=8, slices=(8, 0)),
            "slices[1]",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    pipeline: Pipeline, traffic: SimulatedTraffic, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        simulate(pipeline, traffic)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("table", "field"),
    [
        (TimeTable((), (1,), ()), "rows"),
        (TimeTable((2, 1), (1,), ((1.0,), (1.0,))), "rows"),
        (TimeTable((1,), (1, 2), ((1.0,),)), "seconds"),
        (TimeTable((1,), (1,), ((float("nan"),),)), "seconds[0][0]"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(table: TimeTable, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        table.check()
    assert caught.value.field == field
