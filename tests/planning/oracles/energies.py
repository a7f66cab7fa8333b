"""Random sites with watts, and the fewest joules per token of each by counting out every cut at
every load.

Everything is computed anew from what docs/planning-reference.md says, as in `brute_plans`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from edgeshard.planning.inputs.problem import Objective, PlanProblem
from tests.planning.oracles.brute_plans import Counted
from tests.planning.oracles.instances import random_problem as random_site


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules per token of a placement (node and layers of each stage) with m micro-batches of b
    requests."""

    joules_per_token: float
    placement: tuple[tuple[str, int], ...] = ()
    batch: int = 0
    micro_batches: int = 0


def random_problem(seed: int) -> PlanProblem:
    """Sites of `instances` whose nodes take 0 to 150 W idle and up to 500 W busy; one request, or 2
    to 6 at most."""
    rng = np.random.default_rng([seed, 1])
    problem = random_site(seed, Objective.ENERGY)
    nodes = []
    for node in problem.cluster.nodes:
        idle_w = float(rng.choice([0.0, 3.0, 15.0, 60.0, 150.0])) * float(rng.uniform(0.7, 1.0))
        busy_w = idle_w + float(rng.choice([0.0, 10.0, 60.0, 350.0])) * float(rng.uniform(0.7, 1.0))
        nodes.append(replace(node, device=replace(node.device, idle_w=idle_w, busy_w=busy_w)))
    concurrency = None if rng.random() < 0.4 else int(rng.integers(2, 7))
    return replace(
        problem, cluster=replace(problem.cluster, nodes=tuple(nodes)), concurrency=concurrency
    )


def least_energy(problem: PlanProblem) -> Energy:
    """The fewest joules per token of all; infinite when nothing fits or keeps the time per
    token."""
    counted = _Energies(problem)
    best = Energy(inf)
    for nodes, counts in Counted(problem).placements():
        names = [problem.cluster.nodes[node].name for node in nodes]
        for batch in range(1, problem.batch_limit + 1):
            for index, joules in enumerate(
                counted.of_loads(nodes, counts, batch, best.joules_per_token)
            ):
                if joules < best.joules_per_token:
                    best = Energy(joules, tuple(zip(names, counts, strict=True)), batch, index + 1)
    return best


class _Energies:
    """One problem's joules per token, from the definitions."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem, self._counted = problem, Counted(problem)

    def of_loads(
        self, nodes: tuple[int, ...], counts: tuple[int, ...], batch: int, below: float
    ) -> list[float]:
        """By micro-batches from 1 on; infinite if a limit is broken. A single one may be omitted if
        it is not `below` that.
        """
        counted, new = self._counted, self._problem.new_tokens
        prompt, token = (counted.computing(nodes, counts, batch, phase) for phase in (True, False))
        found = []
        for index, rate in enumerate(counted.rates(nodes, counts, batch)):
            m = index + 1
            if rate <= 0:
                found.append(inf)
            elif batch == m == 1:
                found.append(self._alone(nodes, counts, below))
            else:
                busy = [m * (p + (new - 1) * t) for p, t in zip(prompt, token, strict=True)]
                found.append(self._joules(nodes, busy, m * batch * new / rate) / (m * batch * new))
        return found

    def _joules(self, nodes: tuple[int, ...], busy: list[float], span: float) -> float:
        devices = [self._counted.nodes[node].device for node in nodes]
        return sum(
            (device.idle_w or 0) * (span - seconds) + (device.busy_w or 0) * seconds
            for device, seconds in zip(devices, busy, strict=True)
        )

    def _alone(self, nodes: tuple[int, ...], counts: tuple[int, ...], below: float) -> float:
        """One request, its prompt in slices."""
        counted, new = self._counted, self._problem.new_tokens
        more_s = (new - 1) * counted.token_s(nodes, counts)
        busy = [(new - 1) * seconds for seconds in counted.computing(nodes, counts, 1, False)]
        if self._joules(nodes, busy, more_s) / new >= below:
            return inf  # its tokens take that much by themselves
        prompt, first_s = counted.prompt(nodes, counts)
        busy = [one + other for one, other in zip(busy, prompt, strict=True)]
        return self._joules(nodes, busy, first_s + more_s) / new
