"""The cut and load of the highest rate, prompts included: by enumeration if there are few cuts,
else by search. Pure.

`Best.look` rates each cut at every b and m allowed, so that a search only has to name good cuts. If
there are few cuts (`MOST_COUNTED`), all are named: the answer is exact. Otherwise `rate_bound`
queries the solvers for cuts that could still be better, which also bounds the cuts that are not
found, and neighbours of the best ones are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

import numpy as np

from edgeshard.planning.search.rate_scoring import Best, CutTable, Scorer
from edgeshard.planning.solvers.all_cuts import Cuts, allowed, count_cuts, every_cut
from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.neighbours import neighbours
from edgeshard.planning.solvers.walks import Kinds, single_kinds

MOST_COUNTED = 200_000
"""Cuts that are all rated; 200,000 of five stages take about half a second."""
_CLIMBED = 3
"""Best cuts whose neighbours are tried."""
_CLIMBS = 40
"""Steps from one of them at most."""


def count_out(rates: Scorer, kinds: Kinds | None) -> Best | None:
    """The best of all cuts at all loads; None when there are too many."""
    instance = rates.least
    if kinds is None or count_cuts(instance, kinds) > MOST_COUNTED:
        return None
    best = Best()
    best.look(rates, [rates.places(cuts) for cuts in cuts_by_stages(instance, kinds)])
    return best


def cuts_by_stages(instance: Instance, kinds: Kinds | None) -> Iterator[Cuts]:
    """Every cut that breaks no rule, all of one number of stages at once."""
    for _, group in groupby(every_cut(instance, kinds), key=lambda cuts: cuts.nodes.shape[1]):
        parts = list(group)
        yield Cuts(
            np.concatenate([part.nodes for part in parts]),
            np.concatenate([part.ends for part in parts]),
        )


class Pool:
    """The cuts found so far, each rated at its best load, and the best of all."""

    def __init__(self, rates: Scorer, kinds: Kinds | None) -> None:
        self.rates = rates
        self.kinds = kinds if kinds is not None else single_kinds(rates.least)
        self.best = Best()
        self._seen: dict[Cut, float] = {}
        self._climbed: set[Cut] = set()

    @property
    def known(self) -> Collection[Cut]:
        """The cuts that are rated, each at all its loads."""
        return self._seen.keys()

    def offer(self, cut: Cut | None) -> Best | None:
        """Rate a cut that breaks no rule; returns this cut's figures, None if there is no cut or it
        was rated before."""
        if cut is None or cut in self._seen:
            return None
        own = Best()
        own.look(self.rates, self._groups([cut]))
        self._seen[cut] = own.rate
        if own.rate > self.best.rate:
            self.best = own
        return own

    def climb(self) -> bool:
        """Try the neighbours of the best cuts, and theirs, while they are better; whether the best
        changed."""
        before = self.best.rate
        for cut in sorted(self._seen, key=lambda cut: -self._seen[cut])[:_CLIMBED]:
            if cut in self._climbed or self._seen[cut] <= 0:
                continue
            own = Best(self._seen[cut], cut)
            for _ in range(_CLIMBS):
                assert own.cut is not None
                self._climbed.add(own.cut)
                if not own.look(self.rates, self._groups(neighbours(own.cut, self.kinds))):
                    break
            assert own.cut is not None
            self._seen[own.cut] = own.rate
            if own.rate > self.best.rate:
                self.best = own
        return self.best.rate > before

    def _groups(self, cuts: list[Cut]) -> list[CutTable]:
        by_stages: dict[int, list[Cut]] = {}
        for cut in cuts:
            by_stages.setdefault(len(cut.nodes), []).append(cut)
        arrays = [Cuts.of(same) for same in by_stages.values()]
        fitting = [some.take(allowed(self.rates.least, some)) for some in arrays]
        return [self.rates.places(some) for some in fitting if len(some)]
