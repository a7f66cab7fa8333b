"""The steady rate: its formula, the search for the best, its bound, and the simulator's rate."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.saturation import played_rate
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.steady import MOST_TOGETHER, PromptChunks, SteadyTimes, steady
from edgeshard.planning.inputs.problem import Objective, PlanProblem, Rate
from edgeshard.planning.search import rate_search
from edgeshard.planning.search.plan import GAP_OF_RATE, GAP_OF_STEADY, PlanResult, plan, predict
from edgeshard.planning.search.rate_search import cuts_by_stages
from edgeshard.planning.search.steady_scoring import SteadyRates
from edgeshard.planning.simulation.forecast import saturated, saturating, steady_rate
from edgeshard.planning.simulation.simulated_pipeline import head_schedule
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.scoring import violations
from edgeshard.planning.solvers.walks import single_kinds
from tests.planning.oracles import brute_steady
from tests.planning.oracles.instances import random_problem, served_site
from tests.support.forms import of_the_day

COSTLY = {10, 13, 28, 55}
"""Sites with a number of plans that takes up to a minute each to count."""
SEEDS = [seed for seed in of_the_day(4, range(64)) if seed not in COSTLY]
BOUNDED = of_the_day(40, range(400))
SERVED, LARGER = of_the_day(6, range(50)), of_the_day(2, range(12))
SAME = 1e-9
PLAYED = 0.10
BETTER = 0.035
"""More than 3 % in one of the 50 sites: 3.2 %."""
PLAYED_IN_SLICES, BETTER_IN_SLICES = 0.13, 0.08
"""The formula does not have the overlap of a prompt's slices. On one of the 50 sites the
simulated rate is 12.8 % above the formula's. On another one a different cut is 4.8 % better than
the plan, and on one of the 12 larger sites 7.8 %."""
NEAR, MOST_PLAYED = 0.8, 40
"""Plans with less than this fraction of the best rate are not played: their distance exceeds the
formula's error."""
seconds = st.floats(1e-4, 1.0)


def steady_problem(seed: int) -> PlanProblem:
    return replace(random_problem(seed), rate=Rate.STEADY)


def rate(result: PlanResult) -> float:
    return 0.0 if result.prediction is None else result.prediction.throughput_tps


@cache
def planned(seed: int) -> PlanResult:
    return plan(steady_problem(seed), alternatives=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_cuts_are_few_the_plan_is_nearly_the_best_there_is(seed: int) -> None:
    problem, result = steady_problem(seed), planned(seed)
    if not problem.is_steady:
        pytest.skip("one request at a time has no rate of its own")
    best = brute_steady.best_steady(problem)
    assert rate(result) >= best.tokens_per_s * (1 - 1.01e-3), best
    assert rate(result) <= best.tokens_per_s * (1 + 1e-6), best
    if result.prediction is not None:
        assert result.gap_objective == GAP_OF_STEADY and result.gap is not None
        assert rate(result) / (1 - result.gap) >= best.tokens_per_s * (1 - 1e-6)


@pytest.mark.parametrize("part", range(10))
def test_the_bound_of_a_search_is_never_broken(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in BOUNDED[part::10]:
        problem, best = steady_problem(seed), rate(planned(seed))
        monkeypatch.setattr(rate_search, "MOST_COUNTED", 0)
        found = plan(problem, alternatives=0)
        monkeypatch.undo()
        assert (found.prediction is None) == (not best), seed
        if best and problem.is_steady:
            assert found.gap is not None and rate(found) / (1 - found.gap) >= best * (1 - SAME), (
                seed
            )


def test_a_larger_micro_batch_that_has_just_steps_enough_for_its_prompts_is_not_overlooked() -> (
    None
):
    # With b = 6 each prompt has a step of its own; with 7 some share one, and these take longer.
    problem = replace(random_problem(78, Objective.THROUGHPUT), rate=Rate.STEADY)
    assert rate(plan(problem, 0)) == pytest.approx(brute_steady.best_steady(problem).tokens_per_s)


@given(
    seconds,
    seconds,
    seconds,
    seconds,
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 40),
    st.data(),
)
@settings(max_examples=300)
def test_no_time_makes_it_quicker_and_no_request_slower(
    round_s: float,
    busiest_s: float,
    more_s: float,
    busier_s: float,
    m: int,
    stages: int,
    chunks: int,
    data: st.DataObject,
) -> None:
    batch, rounds = data.draw(st.integers(1, 16)), data.draw(st.integers(0, 600))
    room, prompt = 16, 16 * chunks - data.draw(st.integers(0, 15))
    parts = PromptChunks.of(prompt, np.array([float(room)]), rounds, batch)
    rest = data.draw(st.floats(0.1, 1.0))
    times = {"round_s": max(round_s, busiest_s), "busiest_s": min(round_s, busiest_s)}
    times["full_round_s"] = times["round_s"] + more_s + busier_s
    times["full_busiest_s"] = times["busiest_s"] + busier_s
    times["rest_round_s"] = max(times["round_s"], rest * times["full_round_s"])
    times["rest_busiest_s"] = max(times["busiest_s"], rest * times["full_busiest_s"])
    times["station_s"] = float(
        parts.full[0] * times["full_busiest_s"]
        + parts.rest[0] * times["rest_busiest_s"]
        + max(0.0, rounds / batch - parts.full[0] - parts.rest[0]) * times["busiest_s"]
    )

    def between_s(changed: dict[str, float], requests: int = batch * m) -> float:
        given = times | changed
        prompt_s = parts.full[0] * given["full_busiest_s"] + parts.rest[0] * given["rest_busiest_s"]
        steps = m * (1 + (parts.count[0] - 1) / max(m, stages))
        chunks_of_one = parts.full[0] + parts.rest[0]
        with_prompts = [
            number * prompt_s + max(0.0, steps - number * chunks_of_one) * given["busiest_s"]
            for number in range(1, MOST_TOGETHER + 1)
        ]
        arrays = SteadyTimes(
            **{name: np.array([value]) for name, value in given.items()},
            together_s=np.array(with_prompts)[:, None],
        )
        given_m, count = (np.array([float(value)]) for value in (m, requests))
        return float(steady(arrays, count, given_m, stages, parts, rounds).between_s[0])

    least = between_s({})
    assert np.isfinite(least) and least >= times["station_s"] * (1 - SAME)
    assert between_s({}, batch * m + 1) <= least * (1 + SAME)
    for name, value in times.items():
        assert between_s({name: 1.1 * value}) >= least * (1 - SAME), name


@pytest.mark.parametrize("seed", SERVED)
def test_a_plan_plays_as_planned_and_no_cut_of_a_small_site_plays_much_better(seed: int) -> None:
    """Each cut with the load that is best for it, and with the plan's; the formula rates the others
    lower."""
    problem = served_site(seed)
    result = plan(problem, alternatives=0)
    assert result.prediction is not None
    costs, load = Costs(problem), result.prediction.load
    played = played_rate(costs, result.prediction.cut, load)
    sliced = in_slices(result)
    assert rate(result) == pytest.approx(played, rel=PLAYED_IN_SLICES if sliced else PLAYED)
    better = BETTER_IN_SLICES if sliced else BETTER
    for cut, best in nearly_as_good(costs, NEAR * rate(result)):
        loads = [best] if best == load or violations(costs.decode(load), cut) else [best, load]
        for one in loads:
            assert played_rate(costs, cut, one) <= played * (1 + better), (cut, one)


def in_slices(result: PlanResult) -> bool:
    """Whether a prompt goes in slices through the plan's stages."""
    assert result.prediction is not None
    schedule = head_schedule(Costs(result.problem), result.prediction.cut, result.prediction.load)
    return schedule.slices is not None and len(schedule.slices(result.problem.prompt_tokens)) > 1


def nearly_as_good(costs: Costs, least_rate: float) -> list[tuple[Cut, Load]]:
    """The best cuts by the formula, of a higher rate than the least, with their best loads."""
    rates, found = SteadyRates(costs), dict[Cut, tuple[float, Load]]()
    for cuts in cuts_by_stages(rates.least, single_kinds(rates.least)):
        places = rates.places(cuts)
        for batch in range(1, costs.problem.batch_limit + 1):
            figures = rates.figures(places, batch)
            reached = figures.rates()
            for index in np.flatnonzero(reached > least_rate).tolist():
                cut, own = cuts.cut(index), float(reached[index])
                if cut not in found or own > found[cut][0]:
                    found[cut] = own, Load(batch, figures.fewest(index))
    best = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_PLAYED]
    return [(cut, load) for cut, (_, load) in best]


@pytest.mark.parametrize("seed", LARGER)
def test_none_beside_a_plan_of_a_larger_site_plays_much_better(seed: int) -> None:
    """Among the plans that differ by a border or a node."""
    problem = served_site(seed, nodes=8, layers=32)
    result = plan(problem, alternatives=0)
    assert result.prediction is not None
    costs, load = Costs(problem), result.prediction.load
    played = played_rate(costs, result.prediction.cut, load)
    assert rate(result) == pytest.approx(played, rel=PLAYED)
    for cut in neighbours(result.prediction.cut, single_kinds(costs.decode(Load()))):
        if violations(costs.decode(load), cut):
            continue
        if predict(costs, load, cut).throughput_tps > NEAR * rate(result):
            assert played_rate(costs, cut, load) <= played * (1 + BETTER_IN_SLICES), cut


def test_both_rates_are_told_and_the_rate_is_the_one_that_was_asked_for() -> None:
    problem = served_site(1)
    of_steady, of_together = (
        plan(replace(problem, rate=rate), alternatives=0) for rate in (Rate.STEADY, Rate.TOGETHER)
    )
    assert of_steady.prediction is not None and of_together.prediction is not None
    assert (of_steady.gap_objective, of_together.gap_objective) == (GAP_OF_STEADY, GAP_OF_RATE)
    assert of_together.prediction.together_tps is None
    found = of_steady.prediction
    costs = Costs(replace(problem, rate=Rate.TOGETHER))
    assert found.together_tps == predict(costs, found.load, found.cut).throughput_tps
    tokens = found.load.requests * problem.new_tokens
    assert found.throughput_tps == pytest.approx(tokens / found.request_s)
    assert found.request_s == pytest.approx(
        found.ttft_s + (problem.new_tokens - 1) * found.time_per_token_s
    )


def test_a_request_alone_has_no_steady_rate() -> None:
    alone = replace(served_site(1), concurrency=1, objective=Objective.AUTO)
    assert not alone.is_steady
    result = plan(alone, alternatives=0)
    assert result.prediction is not None and result.prediction.together_tps is None


def test_saturation_begins_as_if_it_had_been_going_on() -> None:
    requests = saturating(8, 100, 40)
    first, others = requests[:8], requests[8:]
    assert len({request.new_tokens for request in first}) == 8 and all(
        request.new_tokens == 40 for request in others
    )
    assert len(others) == 24 and all(request.prompt_tokens == 100 for request in requests)
    with pytest.raises(InvalidArgumentError, match="requests"):
        steady_rate([[1.0]] * 10, 8)


def test_the_steady_rate_of_equal_steps_is_their_rate() -> None:
    # Two at a time, each ten tokens, one token a second each: two tokens a second.
    times = [
        [10.0 * wave + token + 1.0 for token in range(10)] for wave in range(5) for _ in range(2)
    ]
    assert steady_rate(times, 2) == pytest.approx(2.0)


def test_a_plan_is_played_at_saturation_on_request() -> None:
    result = plan(served_site(1), alternatives=0)
    assert result.prediction is not None
    found = saturated(result)
    costs, load = Costs(result.problem), result.prediction.load
    assert found.tokens_per_s == played_rate(costs, result.prediction.cut, load)
    assert found.requests == 4 * load.requests


def test_a_head_on_the_source_is_not_played() -> None:
    problem = replace(served_site(1), head_on_source=True)
    with pytest.raises(InvalidArgumentError, match="head_on_source"):
        played_rate(Costs(problem), Cut((0,), (problem.model.layer_count,)), Load(2, 2))
