"""Good cuts of large sites by random search: a yardstick for the planner's plans and bounds.

Random orders of nodes with random shares of the layers are improved by their neighbours until none
is better. So are the solvers' cuts for other mixes of prompt and tokens. Cuts are scored as the
planner scores them; its searches and bounds take no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.search.rate_scoring import Best, CutRates
from edgeshard.planning.solvers.all_cuts import Cuts, allowed, kinds_of_all, scores
from edgeshard.planning.solvers.instance import Cut, Instance, with_tokens
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.solve import solve_latency, solve_throughput

TRIES = 40
"""Random cuts drawn until one keeps every limit."""


class RandomSearch:
    """For one problem. Values are seconds; of a throughput, the seconds a token takes."""

    def __init__(self, problem: PlanProblem, seed: int) -> None:
        self.problem, self.costs = problem, Costs(problem)
        self._rng = np.random.default_rng(seed)
        self._prefill, self._decode = self.costs.prefill(Load()), self.costs.decode(Load())
        self._kinds = kinds_of_all([self._decode, self._prefill])
        self._rates, self._times = CutRates(self.costs), PromptTimes(self.costs)
        self._tokens = problem.new_tokens - 1 if problem.goal is Objective.REQUEST else 0
        self.best: Cut | None = None
        self.value_s = inf

    def run(self, starts: int, looks: int, given: Sequence[Cut] = ()) -> float:
        """The least value found: climbs from the cuts given, from the solvers' and from random
        ones, `looks` each."""
        drawn = (self._random_cut() for _ in range(starts))
        for cut in dict.fromkeys(
            [*given, *self._solved(), *(cut for cut in drawn if cut is not None)]
        ):
            self._climb(cut, looks)
        return self.value_s

    def _climb(self, cut: Cut, looks: int) -> None:
        value_s, at = self._best_of([cut])
        if at is None:
            return
        while looks > 0:
            near = neighbours(at, self._kinds)
            picked = [near[index] for index in self._rng.permutation(len(near))]
            if self.problem.goal in (Objective.REQUEST, Objective.TTFT):
                picked = picked[:looks]  # slices are searched for each of them
            looks -= len(picked) if len(picked) < len(near) or looks < 1000 else 100
            better_s, better = self._best_of(picked, value_s)
            if better is None or better_s >= value_s:
                break
            value_s, at = better_s, better
        if value_s < self.value_s:
            self.value_s, self.best = value_s, at

    def _best_of(self, cuts: Sequence[Cut], below_s: float = inf) -> tuple[float, Cut | None]:
        """The best of some cuts, those left out that break a limit; for a prompt, the first one
        below a value."""
        best_s, best = inf, None
        for group in self._groups(cuts):
            if self.problem.goal is Objective.THROUGHPUT:
                found = Best()
                found.look(self._rates, [self._rates.places(group)])
                if found.rate > 0 and 1 / found.rate < best_s:
                    best_s, best = 1 / found.rate, found.cut
                continue
            token_s, _ = scores(self._decode, group)
            limit_s = self.problem.max_time_per_token_s
            order = (
                np.argsort(token_s)
                if self.problem.goal is Objective.LATENCY
                else np.arange(len(group))
            )
            for index in order.tolist():
                if limit_s is not None and token_s[index] > limit_s:
                    continue
                value_s = float(token_s[index])
                if self.problem.goal is not Objective.LATENCY:
                    value_s = (
                        self._times.first_token(group.cut(index)).seconds + self._tokens * value_s
                    )
                if value_s < best_s:
                    best_s, best = value_s, group.cut(index)
                if best_s < below_s:
                    return best_s, best
        return best_s, best

    def _groups(self, cuts: Sequence[Cut]) -> Iterator[Cuts]:
        by_stages: dict[int, list[Cut]] = {}
        for cut in cuts:
            by_stages.setdefault(len(cut.nodes), []).append(cut)
        for same in by_stages.values():
            fitting = Cuts.of(same)
            fitting = fitting.take(allowed(self._decode, fitting))
            if len(fitting):
                yield fitting

    def _solved(self) -> Iterator[Cut]:
        """The solvers' best cuts for mixes of prompt and tokens."""
        mixes: list[Instance] = [self._decode, self._prefill]
        mixes += [
            with_tokens(self._prefill, self._decode, tokens)
            for tokens in (1, self.problem.new_tokens)
        ]
        for instance in mixes:
            for micro_batches in (1, 3, 12):
                solve = (
                    solve_latency(instance)
                    if micro_batches == 1
                    else solve_throughput(instance, micro_batches)
                )
                if solve is not None:
                    yield solve.cut

    def _random_cut(self) -> Cut | None:
        instance, rng = self._decode, self._rng
        room = instance.capacity_bytes - instance.stage_bytes
        others = [node for node in range(instance.nodes) if node != instance.source]
        for _ in range(TRIES):
            nodes = list[int]()
            ends = list[int]()
            at = 0
            for node in (instance.source, *rng.permutation(others).tolist()):
                left = room[node] - (0.0 if nodes else instance.embed_bytes)
                most = min(
                    int(left // instance.layer_bytes[0]),
                    int(instance.max_layers[node]),
                    instance.layers - at,
                )
                if most < 1:
                    continue
                at += most if rng.random() < 0.6 else int(rng.integers(1, most + 1))
                nodes.append(node)
                ends.append(at)
                if at == instance.layers:
                    break
            cut = Cut(tuple(nodes), tuple(ends))
            if (
                at == instance.layers
                and nodes[0] == instance.source
                and allowed(instance, Cuts.of([cut]))[0]
            ):
                return cut
        return None
