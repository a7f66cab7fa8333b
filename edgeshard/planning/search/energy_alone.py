"""The cut over which a single request takes the fewest joules, its prompt in the slices that its
head would cut. Pure.

Cuts are examined, and changed step by step, as for the request's time (`request_search`). E is the
joules of the computing above idle, I the idle watts of a cut's nodes and T its time. A cut takes E
+ I T; E and I are sums over stages. With i <= I and t <= T for every cut,

    E + I T  >=  E + I t                and        E + I T  >=  E + t (I - i) + i T'

where T' <= T is a sum over stages and hops as well. So solvers of sums find a lower bound of all
cuts. For a part of the time that a node stands, its own computing time may be the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from edgeshard.planning.costs.batch_time import batch_times
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.energy import energy_j, watts
from edgeshard.planning.costs.prompt_floor import PromptFloor
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.request_search import RequestSearch
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Cut, Floats, Instance, with_tokens
from edgeshard.planning.solvers.scoring import score
from edgeshard.planning.solvers.solve import solve_latency
from edgeshard.planning.solvers.walks import INFINITY, Kinds

_WEIGHTS = (0.0, 1.0, 4.0, 20.0, 200.0)
"""Candidates weigh time by these multiples of a node's mean idle watts, in addition to any cut's
own."""
_PRESSURE = (0.1, 0.5, 2.0, 10.0)
"""How much a time per token beyond the limit costs, as multiples of the energy at the limit."""


class EnergyAlone(RequestSearch):
    """For a single request, in joules of the whole request. The watts of all nodes are known."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs, Objective.ENERGY)
        self._idle_w, self._more_w = watts(costs)
        self._least_s: float | None = None

    def _value(self, cut: Cut, request_s: float) -> float:
        joules = energy_j(
            self._costs, cut, Load(), batch_times(self._costs, cut, Load(), self._times)
        )
        assert joules is not None
        return joules

    def _floors(self, floor: PromptFloor, cuts: Cuts, request_s: Floats) -> Floats:
        computing_j = stage_sums(self._computing(floor), cuts)
        return np.asarray(self._idle_w[cuts.nodes].sum(axis=1) * request_s + computing_j)

    def _instances(self, floor: PromptFloor) -> list[Instance]:
        by_watts = replace(self._decode, overhead_s=self._idle_w, embed_s=self._more_w)
        return [*super()._instances(floor), by_watts]

    def _whole(self, floor: PromptFloor) -> Instance:
        """The least of all slices, and of the tokens."""
        return with_tokens(floor.whole, self._decode, self._tokens)

    def _computing(self, floor: PromptFloor) -> Instance:
        """Joules above idle."""
        return weighted(self._whole(floor), self._more_w)

    def _least_time(self, floor: PromptFloor) -> float:
        """Seconds that no cut takes less than."""
        if self._least_s is None:
            self._least_s = super()._bound(floor)
        return self._least_s

    def _bound(self, floor: PromptFloor) -> float:
        least_s = self._least_time(floor)
        idle = solve_latency(standing(weighted(self._decode, 0 * self._idle_w), self._idle_w))
        if idle is None or least_s == INFINITY:
            return INFINITY
        least_w, source_w = idle.bound_s, np.zeros_like(self._idle_w)
        source_w[self._decode.source] = self._idle_w[self._decode.source]
        others_w = self._idle_w - source_w
        way, bounds = with_tokens(floor.way, self._decode, self._tokens), list[float]()
        always_w = float(source_w.sum())
        for weight, own in ((0.0, 0.0), (least_w, 0.0), (always_w, 0.5), (always_w, 1.0)):
            busy = weighted(self._whole(floor), self._more_w + own * others_w)
            standing_w = others_w * (1 - own) if own else self._idle_w
            instance = standing(with_tokens(busy, way, weight), standing_w * least_s)
            known_j = 0.0 if own else weight * least_s
            bounds.append(bounded(instance, self._decode, self._limit_s).bound - known_j)
        return max(bounds)

    def _closer_bound(self, floor: PromptFloor, kinds: Kinds, values: dict[Cut, float]) -> float:
        return 0.0  # a bound on the request's seconds is no bound on its joules

    def _candidates(self, floor: PromptFloor) -> Iterator[Cut]:
        yield from super()._candidates(floor)
        least_s = self._least_time(floor)
        if least_s == INFINITY:
            return
        computing = self._computing(floor)
        way = with_tokens(self._prefill, self._decode, self._tokens)
        mean = float(self._idle_w.mean()) or float(self._more_w.mean())
        for factor in _WEIGHTS:
            weight = float(self._idle_w[self._decode.source]) + factor * mean
            solution = solve_latency(
                standing(with_tokens(computing, way, weight), self._idle_w * least_s)
            )
            if solution is not None:
                yield solution.cut


@dataclass(frozen=True, slots=True)
class Bounded:
    """A lower bound of all cuts, and good cuts."""

    bound: float
    cuts: tuple[Cut, ...]


def bounded(instance: Instance, decode: Instance, limit_s: float | None) -> Bounded:
    """The least sum of the cuts whose token takes at most the limit: with R its way, sum >= sum + w
    (R - limit).

    Weights w are tried as multiples of what the sum's best cut has for each second of the limit.
    """
    solution = solve_latency(instance)
    if solution is None:
        return Bounded(INFINITY, ())
    bounds, cuts = [solution.bound_s], [solution.cut]
    if limit_s is not None and score(decode, solution.cut).round_s > limit_s:
        for times in _PRESSURE:
            weight = times * solution.value_s / limit_s
            pressed = solve_latency(with_tokens(instance, decode, weight))
            if pressed is not None:
                bounds.append(pressed.bound_s - weight * limit_s)
                cuts.append(pressed.cut)
    return Bounded(max(bounds), tuple(cuts))


def weighted(instance: Instance, weights: Floats) -> Instance:
    """The computing seconds of each node times its weight; links take nothing, and missing ones
    stay missing."""
    none = np.where(np.isfinite(instance.hop_s), 0.0, INFINITY)
    back = np.where(np.isfinite(instance.return_s), 0.0, INFINITY)
    return replace(
        instance,
        compute_s=instance.compute_s * weights[:, None],
        embed_s=instance.embed_s * weights,
        head_s=instance.head_s * weights,
        overhead_s=instance.overhead_s * weights,
        hop_s=none,
        return_s=back,
        latency_s=np.zeros_like(instance.latency_s),
    )


def standing(instance: Instance, per_stage: Floats) -> Instance:
    """So much more for each node that is a stage at all."""
    return replace(instance, overhead_s=instance.overhead_s + per_stage)


def stage_sums(instance: Instance, cuts: Cuts) -> Floats:
    """[K] the sum over a cut's stages of `compute_s` and the like, without links."""
    nodes = cuts.nodes
    done = np.concatenate(
        [np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1
    )
    sums = (instance.overhead_s[nodes] + done[nodes, cuts.ends] - done[nodes, cuts.starts]).sum(
        axis=1
    )
    sums += instance.embed_s[instance.source]
    head = nodes[:, 0] if instance.head_on_source else nodes[:, -1]
    return np.asarray(sums + instance.head_s[head])
