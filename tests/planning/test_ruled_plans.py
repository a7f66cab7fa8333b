"""Plans under rules: the best of all that are counted out, or a smallest set of rules that cannot
hold together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from edgeshard.cpsat.solver_process import CpSat
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.domain.deployments.rules import RuledNode, broken, parse_rule, resolve
from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.models.packed_units import PackedParts
from edgeshard.planning.inputs.problem import Objective, PlanProblem, Rate
from edgeshard.planning.report.baselines import compare
from edgeshard.planning.search import rate_search
from edgeshard.planning.search.plan import GAP_OF_STEADY, plan
from edgeshard.planning.search.steady_scoring import NEARLY
from edgeshard.planning.search.verify import verify
from edgeshard.planning.solvers.linear import ROUNDING, LinearAnswer, Question
from tests.planning.oracles.brute_plans import best_value
from tests.planning.oracles.brute_steady import best_steady
from tests.planning.oracles.instances import random_problem
from tests.planning.oracles.random_rules import with_rules
from tests.support.forms import of_the_day

OBJECTIVES = (Objective.LATENCY, Objective.TTFT, Objective.REQUEST, Objective.THROUGHPUT)
INSTANCES, CONFLICTS = 200, 100
PARTS = 8
SAME = 2 * ROUNDING


@pytest.fixture(scope="module")
def prover() -> Iterator[CpSat]:
    with CpSat(total_s=600.0) as found:
        yield found


def ruled(seed: int, most: int = 3) -> PlanProblem:
    return with_rules(random_problem(seed, OBJECTIVES[seed % 4]), seed, most)


def steady(seed: int) -> PlanProblem:
    """One whose cuts the oracle counts out in a second: of five nodes few layers, of four a limit
    of requests."""
    problem = replace(random_problem(seed, Objective.THROUGHPUT), rate=Rate.STEADY)
    if len(problem.cluster.nodes) > 4 and problem.model.layer_count > 6:
        return steady(seed + INSTANCES)
    if len(problem.cluster.nodes) > 3 and problem.concurrency is None:
        problem = replace(problem, concurrency=12)
    return with_rules(problem, seed)


def nodes_of(placement: str) -> list[str]:
    return [stage.node for stage in parse_layers(placement)]


@pytest.mark.parametrize("part", of_the_day(2, range(PARTS)))
def test_a_plan_is_the_best_of_all_that_keep_the_rules(part: int, prover: CpSat) -> None:
    for seed in range(part, INSTANCES, PARTS):
        problem = ruled(seed)
        result, wanted = plan(problem, prover=prover), best_value(problem)
        if result.prediction is None:
            assert wanted == inf
            continue
        cost = result.prediction.cost(problem.goal)
        assert cost == pytest.approx(wanted, rel=SAME)
        assert result.gap is not None
        assert cost * (1 - result.gap) <= wanted * (1 + SAME)
        placements = [result.placement, *(other.placement for other in result.alternatives)]
        assert [broken(problem.rules, nodes_of(placement)) for placement in placements] == [
            ()
        ] * len(placements)


@pytest.mark.long
@pytest.mark.parametrize("part", of_the_day(1, range(PARTS)))
def test_steady_rates_are_the_best_under_rules_and_bounds_of_searches_hold(
    part: int, prover: CpSat, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(part, INSTANCES, PARTS):
        problem = steady(seed)
        best = best_steady(problem).tokens_per_s
        counted = plan(problem, prover=prover)
        monkeypatch.setattr(rate_search, "MOST_COUNTED", 0)
        searched = [plan(problem, prover=Hasty(prover, most)) for most in (1, 20)] if best else []
        monkeypatch.undo()
        for result in (counted, *searched):
            assert result.feasible == bool(best), seed
            if result.prediction is None:
                continue
            found = result.prediction.throughput_tps
            assert found <= best * (1 + SAME), seed
            assert result.gap_objective == GAP_OF_STEADY and result.gap is not None
            assert found / (1 - result.gap) >= best * (1 - SAME), seed
            placements = [result.placement, *(other.placement for other in result.alternatives)]
            assert [broken(problem.rules, nodes_of(one)) for one in placements] == [()] * len(
                placements
            )
        if best:
            assert counted.prediction is not None
            assert counted.prediction.throughput_tps >= best * (1 - 1.01 * NEARLY), seed


@pytest.mark.parametrize("part", of_the_day(2, range(PARTS)))
def test_rules_that_cannot_hold_together_are_named_and_none_of_them_can_be_dropped(
    part: int, prover: CpSat
) -> None:
    found = 0
    for seed in range(part, 10**6, PARTS):
        problem = ruled(seed, most=5)
        shortage = plan(problem, 0, prover).shortage
        if shortage is None or shortage.constraint != "rules":
            continue
        named = {rule.text for rule in problem.rules if f"'{rule.text}'" in shortage.text}
        asked = replace(problem, objective=Objective.LATENCY)
        assert named
        assert (
            best_value(
                replace(asked, rules=tuple(rule for rule in problem.rules if rule.text in named))
            )
            == inf
        )
        for text in named:
            fewer = tuple(
                rule for rule in problem.rules if rule.text in named and rule.text != text
            )
            assert best_value(replace(asked, rules=fewer)) < inf
        found += 1
        if found == -(-CONFLICTS // PARTS):
            return


def test_what_lacks_without_any_rule_is_told_as_without_rules(prover: CpSat) -> None:
    problems = (ruled(seed) for seed in range(200))
    problem = next(one for one in problems if plan(replace(one, rules=()), 0).shortage is not None)
    assert plan(problem, 0, prover).shortage == plan(replace(problem, rules=()), 0).shortage


def test_a_rule_without_a_prover_is_a_typed_error() -> None:
    with pytest.raises(FailedPreconditionError, match=r"\[rules\]") as raised:
        plan(ruled(1))
    assert (raised.value.reason, raised.value.field) == ("RULES_NEED_CPSAT", "rule")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"allow_streaming": True}, "allow_streaming"),
        ({"objective": Objective.ENERGY}, "objective"),
    ],
)
def test_streaming_and_energy_are_refused_under_rules(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        plan(replace(ruled(1), **changes))  # type: ignore[arg-type]
    assert raised.value.field == field


class Slow:
    """A prover whose time was over before it found anything."""

    def ask(self, question: Question) -> LinearAnswer:
        return LinearAnswer(None, 0.0, is_out_of_time=True)


class Hasty:
    """A prover that has time for a fixed number of questions."""

    def __init__(self, prover: CpSat, questions: int) -> None:
        self._prover, self._left = prover, questions

    def ask(self, question: Question) -> LinearAnswer:
        if not self._left:
            return Slow().ask(question)
        self._left -= 1
        return replace(self._prover.ask(question), is_out_of_time=not self._left)


def test_without_time_there_is_an_error_or_a_plan_with_a_gap_that_holds(prover: CpSat) -> None:
    with pytest.raises(ResourceExhaustedError) as raised:
        plan(next(one for one in map(ruled, range(99)) if plan(one, 0, prover).feasible), 0, Slow())
    assert raised.value.reason == "CPSAT_EXHAUSTED"
    for seed in range(60):
        problem = ruled(seed)
        best = plan(problem, 0, prover)
        if best.prediction is None:
            continue
        found = plan(problem, 0, Hasty(prover, 1))
        assert found.prediction is not None
        assert found.gap is not None
        least = found.prediction.cost(problem.goal) * (1 - found.gap)
        assert least <= best.prediction.cost(problem.goal) * (1 + SAME)


def test_a_plan_near_what_nodes_hold_keeps_the_rules(prover: CpSat) -> None:
    for seed in range(40):
        problem = ruled(seed)
        layers = range(problem.model.layer_count)
        everywhere = {
            name: PackedParts(frozenset(layers), True, True) for name in problem.cluster.names[1:]
        }
        found = plan(replace(problem, packed_parts=everywhere), 0, prover)
        assert (
            broken(problem.rules, [stage.node for stage in found.stages]) == ()
            or not found.feasible
        )


def test_strategies_that_break_a_rule_have_no_plan_in_a_comparison(prover: CpSat) -> None:
    problem = random_problem(8, Objective.LATENCY)
    nodes = [RuledNode(name) for name in problem.cluster.names]
    rules = resolve([parse_rule(f"avoid {problem.cluster.names[1]}")], nodes)
    for row in compare(replace(problem, rules=rules), prover):
        assert not row.feasible or broken(rules, nodes_of(row.placement)) == ()


# the solver proves the question of each in seconds
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 6, 7, 9, 10])
def test_a_plan_is_verified_with_and_without_rules(seed: int, prover: CpSat) -> None:
    asked = (ruled(seed), steady(seed))
    for problem in (*asked, *(replace(one, rules=()) for one in asked)):
        found = verify(plan(problem, 0, prover), prover)
        assert found.better == ""
        assert found.proven


@pytest.mark.parametrize("rate", Rate)
def test_a_plan_that_is_not_the_best_is_found_out(rate: Rate, prover: CpSat) -> None:
    worse = 0
    for seed in range(24):
        problem = replace(
            random_problem(seed, OBJECTIVES[seed % 4]), max_time_per_token_s=None, rate=rate
        )
        best, other = plan(problem, 0), plan(replace(problem, max_nodes=1, min_nodes=1), 0)
        if best.prediction is None or other.prediction is None:
            continue
        if other.prediction.cost(problem.goal) > best.prediction.cost(problem.goal) * 1.01:
            found = verify(replace(other, problem=problem), prover)
            assert found.better
            assert found.cheaper > 0
            worse += 1
    assert worse > 3


def test_where_prompts_of_others_make_every_token_late_that_is_told(prover: CpSat) -> None:
    free = replace(random_problem(121, Objective.THROUGHPUT), rate=Rate.STEADY)
    result = plan(free, 0)
    assert result.shortage is not None and result.shortage.constraint == "max_time_per_token"
    assert "prompts of others" in result.shortage.text and result.shortage.amount == 0
    found = verify(result, prover)
    assert found.proven and not found.better
