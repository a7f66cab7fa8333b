"""Mixed serving against cases worked out by hand, against the simulator of batches, and against the
head's rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.made_rings import linear_hop
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.simulation.serving import (
    Schedule,
    ServedRequest,
    Serving,
    ServingRing,
    StepSpan,
    percentile,
    serve,
)
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import HopTimes, Pipeline, SimulatedTraffic, StageTimes


def a_second_a_token(spans: Sequence[StepSpan]) -> float:
    return float(sum(span.tokens for span in spans))


def a_second_a_step(spans: Sequence[StepSpan]) -> float:
    return 1.0


ALONE = ServingRing((a_second_a_token,))


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    result = serve(ALONE, [ServedRequest(2.0, 10, 3)], Schedule(token_budget=4))
    assert [
        [(span.tokens, span.context, span.sample) for span in step.spans] for step in result.steps
    ] == [
        [(4, 0, False)],
        [(4, 4, False)],
        [(2, 8, True)],
        [(1, 10, True)],
        [(1, 11, True)],
    ]
    assert result.token_s == ((12.0, 13.0, 14.0),)
    assert result.ttft_s == (10.0,)
    assert result.inter_token_s == (1.0, 1.0)
    assert (result.span_s, result.tokens_per_s) == (12.0, 0.25)
    assert result.bubble_share == 0


def test_a_prompt_goes_in_slices_beyond_the_budget_while_nobody_decodes() -> None:
    schedule = Schedule(
        batch=2, token_budget=4, slices=lambda tokens: (tokens - 3, 3), slice_budget=6
    )
    result = serve(ALONE, [ServedRequest(0.0, 8, 4), ServedRequest(9.5, 8, 1)], schedule)
    # Both slices of A and two decodes. The budget's rest for B with the third; the rest of B in
    # slices again.
    assert [[span.tokens for span in step.spans] for step in result.steps] == [
        [5],
        [3],
        [1],
        [1],
        [1, 3],
        [2],
        [3],
    ]


def test_a_prompt_that_arrives_is_fitted_in_between_decodes() -> None:
    """Steps of A: its prompt 0-1, a decode 1-2, then three decodes with two tokens of B each: 2-5,
    5-8, 8-11."""
    arrivals = [ServedRequest(0.0, 1, 5), ServedRequest(1.5, 6, 2)]
    result = serve(ALONE, arrivals, Schedule(batch=2, token_budget=3))
    assert result.token_s == ((1.0, 2.0, 5.0, 8.0, 11.0), (11.0, 12.0))
    assert result.ttft_s == (1.0, 9.5)
    assert result.inter_token_s == (1.0, 3.0, 3.0, 3.0, 1.0)
    assert percentile(result.inter_token_s, 50) == 3.0
    assert percentile(result.ttft_s, 100) == 9.5
    assert percentile(result.ttft_s, 50) == pytest.approx(5.25)


def test_a_larger_budget_gives_the_first_token_sooner_and_holds_the_others_up_longer() -> None:
    arrivals = [ServedRequest(0.0, 1, 12), ServedRequest(0.5, 8, 1)]
    tight, wide = (
        serve(ALONE, arrivals, Schedule(batch=2, token_budget=budget)) for budget in (3, 9)
    )
    # Behind A's first step: four steps of three seconds, or one of nine.
    assert (tight.ttft_s[1], wide.ttft_s[1]) == (12.5, 9.5)
    assert (max(tight.inter_token_s), max(wide.inter_token_s)) == (3.0, 9.0)


def test_two_micro_batches_keep_two_equal_stages_at_work() -> None:
    """A token of either takes two stages' seconds; the second is one after the first."""
    ring = ServingRing((a_second_a_step, a_second_a_step), (linear_hop(0.0),) * 2)
    requests = [ServedRequest(0.0, 1, 3)] * 2
    result = serve(ring, requests, Schedule(micro_batches=2, token_budget=1))
    assert result.token_s == ((2.0, 4.0, 6.0), (3.0, 5.0, 7.0))
    assert result.node_utilisation == pytest.approx([6 / 7, 6 / 7])
    assert result.bubble_share == pytest.approx(1 / 7)
    one_by_one = serve(ring, requests, Schedule(token_budget=1))
    assert one_by_one.token_s == ((2.0, 4.0, 6.0), (8.0, 10.0, 12.0)), (
        "one place: the second waits for the first"
    )
    assert one_by_one.bubble_share == pytest.approx(0.5)


def test_chunks_follow_each_other_without_waiting_where_the_window_lets_them() -> None:
    ring = ServingRing(
        (a_second_a_token, a_second_a_token), (linear_hop(0.0, latency_s=0.5), linear_hop(0.0))
    )
    request = [ServedRequest(0.0, 4, 1)]
    assert serve(ring, request, Schedule(token_budget=1)).ttft_s == (4 * 2.5,)
    assert serve(ring, request, Schedule(token_budget=1, window=4)).ttft_s == (4 + 0.5 + 1,)


def test_a_hop_carries_the_steps_tokens_and_the_return_those_sampled() -> None:
    carried: dict[str, list[int]] = defaultdict(list)

    def hop(name: str) -> HopTimes:
        return HopTimes(lambda tokens: carried[name].append(tokens) or 0.0)  # type: ignore[func-returns-value]

    ring = ServingRing((a_second_a_step,) * 2, (hop("forward"), hop("return")))
    serve(
        ring,
        [ServedRequest(0.0, 3, 2), ServedRequest(0.0, 5, 1)],
        Schedule(batch=2, token_budget=6),
    )
    # Six tokens: all of the first prompt and three of the second. Then a decode and the other two;
    # nothing is left.
    assert carried == {"forward": [6, 3], "return": [1, 2]}


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_that_starts_together_is_the_simulators(seed: int) -> None:
    """Prompts as large as the budget, as many requests as places: then both have the same steps."""
    rng = np.random.default_rng(seed)
    stages = seed % 4 + 1
    micro_batches = seed % 3 + 1
    batch = seed % 2 + 1
    prompt = 8
    new = 6
    fixed, per_token = rng.uniform(0.01, 0.2, stages), rng.uniform(0.001, 0.05, stages)

    def seconds(stage: int, tokens: int) -> float:
        return float(fixed[stage] + per_token[stage] * tokens)

    hops = tuple(
        linear_hop(float(rng.uniform(0, 0.02)), latency_s=float(rng.uniform(0, 0.1)))
        for _ in range(stages if stages > 1 else 0)
    )
    pipeline = Pipeline(
        tuple(
            StageTimes(
                partial(lambda s, tokens, _: seconds(s, tokens), s),
                partial(lambda s, count, _: seconds(s, count), s),
            )
            for s in range(stages)
        ),
        hops,
    )
    ring = ServingRing(
        tuple(
            partial(lambda s, spans: seconds(s, sum(x.tokens for x in spans)), s)
            for s in range(stages)
        ),
        hops,
    )
    expected = simulate(pipeline, SimulatedTraffic(batch, micro_batches, prompt, new))
    schedule = Schedule(batch, micro_batches, token_budget=batch * prompt)
    result = serve(ring, [ServedRequest(0.0, prompt, new)] * (batch * micro_batches), schedule)
    for request, times in enumerate(result.token_s):
        assert times == pytest.approx(expected.token_s[request // batch])
    assert result.bubble_share == pytest.approx(expected.bubble_share)


requests_drawn = st.lists(
    st.builds(ServedRequest, st.integers(0, 20).map(float), st.integers(1, 9), st.integers(1, 5)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    requests_drawn,
    st.builds(
        Schedule,
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(3, 7),
        st.sampled_from([None, 3, 6]),
    ),
    st.integers(1, 3),
)
def test_the_heads_rules_hold_for_any_arrivals(
    requests: list[ServedRequest], schedule: Schedule, stages: int
) -> None:
    hops = (linear_hop(0.25, latency_s=0.5),) * (stages if stages > 1 else 0)
    result = serve(ServingRing((a_second_a_token,) * stages, hops), requests, schedule)
    check_positions(requests, result)
    check_limits(requests, schedule, result)


def check_positions(requests: list[ServedRequest], result: Serving) -> None:
    """Each position of a request is computed once, in order; a decode only when the token before is
    back."""
    reached: dict[int, int] = defaultdict(int)
    sampled: dict[int, int] = defaultdict(int)
    for step in result.steps:
        for span in step.spans:
            request = requests[span.request]
            assert span.context == reached[span.request]
            assert step.formed_s >= request.arrival_s
            reached[span.request] += span.tokens
            assert span.sample == (reached[span.request] >= request.prompt_tokens)
            if sampled[span.request]:
                assert step.formed_s >= result.token_s[span.request][sampled[span.request] - 1]
            if span.sample:
                assert result.token_s[span.request][sampled[span.request]] == step.back_s
                sampled[span.request] += 1
    for index, request in enumerate(requests):
        assert sampled[index] == request.new_tokens == len(result.token_s[index])
        assert reached[index] == request.prompt_tokens + request.new_tokens - 1


def check_limits(requests: list[ServedRequest], schedule: Schedule, result: Serving) -> None:
    for index, step in enumerate(result.steps):
        assert sum(span.tokens for span in step.spans) <= schedule.token_budget
        assert step.decodes <= schedule.batch
        others = [other for other in result.steps[:index] if other.back_s > step.formed_s]
        assert len(others) < schedule.steps_in_flight
        if step.decodes:
            assert sum(other.decodes > 0 for other in others) < schedule.micro_batches
        began = {span.request for other in result.steps[: index + 1] for span in other.spans}
        running = [request for request in began if result.token_s[request][-1] > step.formed_s]
        assert len(running) <= schedule.batch * schedule.micro_batches
    firsts = sorted(range(len(requests)), key=lambda index: (requests[index].arrival_s, index))
    assert [result.token_s[index][0] for index in firsts] == sorted(
        times[0] for times in result.token_s
    )


@pytest.mark.parametrize(
    ("ring", "request_", "schedule", "field"),
    [
        (ServingRing(()), ServedRequest(0, 1, 1), Schedule(), "stages"),
        (ServingRing((a_second_a_step,) * 2), ServedRequest(0, 1, 1), Schedule(), "hops"),
        (
            ServingRing((lambda spans: float("nan"),)),
            ServedRequest(0, 1, 1),
            Schedule(),
            "stages[0]",
        ),
        (ALONE, ServedRequest(-1, 1, 1), Schedule(), "requests[0].arrival_s"),
        (ALONE, ServedRequest(float("nan"), 1, 1), Schedule(), "requests[0].arrival_s"),
        (ALONE, ServedRequest(0, 0, 1), Schedule(), "requests[0].prompt_tokens"),
        (ALONE, ServedRequest(0, 1, 0), Schedule(), "requests[0].new_tokens"),
        (ALONE, ServedRequest(0, 1, 1), Schedule(batch=4, token_budget=3), "token_budget"),
        (ALONE, ServedRequest(0, 1, 1), Schedule(micro_batches=4, window=3), "window"),
        (ALONE, ServedRequest(0, 1, 1), Schedule(micro_batches=0), "micro_batches"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    ring: ServingRing, request_: ServedRequest, schedule: Schedule, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        serve(ring, [request_], schedule)
    assert caught.value.field == field


def test_nothing_to_serve_and_no_such_percentile_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="requests"):
        serve(ALONE, [], Schedule())
    with pytest.raises(InvalidArgumentError, match="percent"):
        percentile((1.0,), 101)
