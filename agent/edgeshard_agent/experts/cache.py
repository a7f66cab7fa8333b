"""Which experts are in memory: what is read ahead, and which one goes when room is needed.

A token passes the mixtures in order, again and again. So what an expert's room is worth follows from two things: how
far away its layer's next turn is, and how often the router there chooses it (EdgeMoE's frequency and distance). The one
whose next use is expected last goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeshard_agent.experts.table import Choices, Chosen, ExpertTable

Expert = tuple[int, int]
"""(mixture, expert), both from 0."""

# How much one token weighs in the share of tokens that choose an expert: about the last hundred count.
_RECENT = 0.01
_LEAST_SHARE = 1e-4
# Of what least recently used has read; the rest is for misses to come that it has not.
_SPENT = 0.99


@dataclass(slots=True)
class Counts:
    """What a cache did: experts that steps needed, those of them that were there, and experts read from storage."""

    needed: int = 0
    hits: int = 0
    loads: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.needed if self.needed else 0.0


@dataclass(frozen=True, slots=True)
class Use:
    """An expert that is used now, or that may be. `load`: it is to be read first, in the place of `gone` if given."""

    expert: Expert
    load: bool = False
    gone: Expert | None = None


class ExpertCache(Protocol):
    """What every policy answers. It decides; the caller reads, computes and forgets, in the order it is told."""

    counts: Counts

    def ahead(self, layer: int) -> Iterator[Use]:
        """Experts of a layer to be read while its router has not spoken; each counts as read once it is given out."""

    def choose(self, layer: int, chosen: Chosen) -> Sequence[Use]:
        """What the routers of a step's tokens have chosen, each expert once: a prompt is computed expert by expert.

        Those in memory come first. So where a step needs more experts than there is room for, each is read once: it
        takes the place of one that the step is done with.
        """


def _distinct(chosen: Chosen) -> list[int]:
    found: list[int] = np.unique(chosen).tolist()
    return found


class LeastRecentlyUsed:
    """The baseline: reads what is missing, in place of what was used longest ago."""

    def __init__(self, slots: int) -> None:
        self.counts = Counts()
        self._slots = slots
        self._resident: OrderedDict[Expert, None] = OrderedDict()

    def ahead(self, layer: int) -> Iterator[Use]:
        yield from ()

    def choose(self, layer: int, chosen: Chosen) -> Sequence[Use]:
        keys = [(layer, expert) for expert in _distinct(chosen)]
        uses = [Use(key) for key in keys if key in self._resident]
        self.counts.needed += len(keys)
        self.counts.hits += len(uses)
        for use in uses:
            self._resident.move_to_end(use.expert)
        for key in keys:
            if key in self._resident:
                continue
            gone = self._resident.popitem(last=False)[0] if len(self._resident) >= self._slots else None
            self._resident[key] = None
            self.counts.loads += 1
            uses.append(Use(key, True, gone))
        return uses


@dataclass(slots=True)
class _Seen:
    """What the routers of the last two layers chose, for each token of a step."""

    last: Chosen | None = None
    earlier: Chosen | None = None

    def of(self, tokens: int) -> tuple[Chosen | None, Chosen | None]:
        """The same for a step of so many tokens; the last ones of a longer step before it go on."""
        last, earlier = (
            rows[-tokens:] if rows is not None and len(rows) >= tokens else None for rows in (self.last, self.earlier)
        )
        return last, earlier


@dataclass(slots=True)
class ForecastCache:
    """Reads ahead what the table says is likely, and lets go what is needed last.

    At most `most_ahead` experts of a layer are read ahead, the likeliest first, each at least `least_likely`. None is
    once as many experts were read as least recently used would have read, nearly: a wrong guess is a read for nothing,
    and what better eviction saves is all that guesses may spend.
    """

    slots: int
    table: ExpertTable
    most_ahead: int = 3
    least_likely: float = 0.3
    counts: Counts = field(default_factory=Counts)
    _plain: LeastRecentlyUsed = field(init=False)
    _resident: NDArray[np.bool_] = field(init=False)
    _held: int = 0
    _share: NDArray[np.float64] = field(init=False)
    _seen: _Seen = field(default_factory=_Seen)

    def __post_init__(self) -> None:
        self._plain = LeastRecentlyUsed(self.slots)
        self._resident = np.zeros((self.table.layers, self.table.experts), dtype=bool)
        self._share = 1.0 / (1.0 + np.exp(-self.table.base.astype(np.float64)))

    def ahead(self, layer: int, tokens: int = 1) -> Iterator[Use]:
        if self.most_ahead == 0:
            return
        forecast = self.table.forecast(layer, *self._seen.of(tokens))
        for expert in np.argsort(-forecast)[: self.most_ahead].tolist():
            if forecast[expert] < self.least_likely:
                return
            if self._resident[layer, expert]:
                continue
            if self.counts.loads >= _SPENT * self._plain.counts.loads:
                return
            yield Use((layer, expert), True, self._load(layer, expert, layer, forecast, [expert]))

    def choose(self, layer: int, chosen: Chosen) -> Sequence[Use]:
        self._plain.choose(layer, chosen)
        experts = _distinct(chosen)
        uses = [Use((layer, expert)) for expert in experts if self._resident[layer, expert]]
        missing = [expert for expert in experts if not self._resident[layer, expert]]
        self.counts.needed += len(experts)
        self.counts.hits += len(uses)
        following = (layer + 1) % self.table.layers
        before, _ = self._seen.of(len(chosen))
        forecast = self.table.forecast(following, chosen, before)
        # What this step uses stays while it may: its reads and products overlap.
        kept = experts if len(experts) < self.slots else []
        for expert in missing:
            uses.append(Use((layer, expert), True, self._load(layer, expert, following, forecast, [*kept, expert])))
        share = self._share[layer]
        counted = np.bincount(chosen.ravel(), minlength=len(share)) / len(chosen)
        share += (1.0 - (1.0 - _RECENT) ** len(chosen)) * (counted - share)
        self._seen = _Seen(chosen, before)
        return uses

    def _load(
        self, layer: int, expert: int, following: int, forecast: NDArray[np.float32], kept: list[int]
    ) -> Expert | None:
        """Make room for an expert; returns the one that goes."""
        gone = self._let_go(following, forecast, layer, kept) if self._held >= self.slots else None
        self._resident[layer, expert] = True
        self._held += gone is None
        self.counts.loads += 1
        return gone

    def _let_go(self, following: int, forecast: NDArray[np.float32], layer: int, kept: list[int]) -> Expert:
        """The resident expert whose next use is expected last, counted in turns of layers.

        A layer comes after as many turns as it is away, and its expert is chosen then with its share, or again a round
        later. Of the layer that follows the forecast is known.
        """
        layers, experts = self.table.layers, self.table.experts
        distance = (np.arange(layers) - following) % layers
        rounds = 1.0 / np.maximum(self._share, _LEAST_SHARE) - 1.0
        # Not chosen in this round, it waits a whole one and what it takes from there on.
        rounds[following] = (1.0 - forecast) * (1.0 + rounds[following])
        expected = distance[:, None] + layers * rounds
        expected[~self._resident] = -2.0
        expected[layer, kept] = np.minimum(expected[layer, kept], -1.0)
        place, expert = divmod(int(expected.argmax()), experts)
        self._resident[place, expert] = False
        return place, expert


def replay(choices: Choices, cache: ExpertCache) -> Counts:
    """What a cache does on recorded routing, token by token, where what is read ahead is always there in time."""
    for token in choices:
        for layer, chosen in enumerate(token):
            for _ in cache.ahead(layer):
                pass
            cache.choose(layer, chosen[None])
    return cache.counts
