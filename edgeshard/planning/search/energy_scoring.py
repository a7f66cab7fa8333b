"""The tokens per joule of many cuts at once, each at the best load it can have. Pure.

With I the idle watts of a cut's nodes, and C the joules above idle that one micro-batch's prompts and answers take,

    joules per token = I / rate + C / (b G)

For one cut and one b only the rate depends on m, and it never falls with m (`rate_scoring`). So the best m is the
largest allowed here too, and what bounds the rates of larger b bounds the energy: no C shrinks as b grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.energy import watts
from edgeshard.planning.search.rate_scoring import CutRates, CutTable, Figures
from edgeshard.planning.solvers.all_cuts import Cuts
from edgeshard.planning.solvers.instance import Floats
from edgeshard.planning.solvers.walks import Integers


@dataclass(frozen=True, slots=True)
class EnergyFigures:
    """[K] tokens per joule at one b. A single request, b = m = 1, is left out: its prompt goes in slices."""

    figures: Figures
    idle_w: Floats
    computing_j: Floats

    @property
    def micro_batches(self) -> Integers:
        return self.figures.micro_batches

    def rates(self) -> Floats:
        tokens_per_s = np.where(self.micro_batches >= self._least, self.figures.rates(), 0.0)
        return self._per_joule(tokens_per_s, self.figures.batch)

    def first(self, rates: Floats) -> int:
        return self.figures.first(rates)

    def fewest(self, index: int) -> int:
        return max(self._least, self.figures.fewest(index))

    def at_most(self, batch: int) -> Floats:
        return self._per_joule(self.figures.at_most(batch), batch)

    @property
    def _least(self) -> int:
        return 2 if self.figures.batch == 1 else 1

    def _per_joule(self, tokens_per_s: Floats, batch: int) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            joules = self.idle_w / tokens_per_s + self.computing_j / (batch * self.figures.new_tokens)
            return np.where(tokens_per_s > 0, 1.0 / joules, 0.0)


class EnergyRates:
    """The tokens per joule of one problem's cuts."""

    def __init__(self, costs: Costs) -> None:
        self.rates = CutRates(costs)
        self.problem, self.least = costs.problem, self.rates.least
        self._idle_w, self._more_w = watts(costs)

    def places(self, cuts: Cuts) -> CutTable:
        return self.rates.places(cuts)

    def figures(self, places: CutTable, batch: int) -> EnergyFigures:
        prompt, token = (places.stages(table) for table in self.rates.tables(batch))
        seconds = prompt + (self.problem.new_tokens - 1) * token
        computing_j = (self._more_w.take(places.nodes) * seconds).sum(axis=0)
        idle_w = self._idle_w.take(places.nodes).sum(axis=0)
        return EnergyFigures(self.rates.figures(places, batch), idle_w, computing_j)
