"""A cache of experts in memory: it decides which ones are read ahead, and which one goes when room is needed.

A token passes the mixtures in order, again and again. So the value of an expert's place follows
from two things (EdgeMoE's frequency and distance). They are the distance to its layer's next turn,
and how often the router there chooses it. The one whose next use is expected last goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeshard_agent.experts.table import Chosen, ExpertTable

Expert = tuple[int, int]
"""(mixture, expert), both from 0."""
Sizes = NDArray[np.int64]
"""[layers, experts]: bytes of each expert."""

MOST_AHEAD = 3
# How much one token weighs in the share of tokens that choose an expert: about the last hundred count.
_RECENT = 0.01
_LEAST_SHARE = 1e-4
# Fraction of the bytes that least-recently-used has read; the rest is for later misses that it does not have.
_SPENT = 0.99


@dataclass(slots=True)
class CacheCounts:
    """Counts of a cache: experts that steps needed, how many of them were in memory, and bytes read from storage."""

    needed: int = 0
    hits: int = 0
    bytes_read: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.needed if self.needed else 0.0


@dataclass(frozen=True, slots=True)
class Use:
    """An expert that is used now. `load`: it is to be read first, in the room of the experts in `victims`."""

    expert: Expert
    load: bool = False
    victims: tuple[Expert, ...] = ()


class ExpertCache(Protocol):
    """A policy of the cache. It decides; the caller reads, computes and forgets in the given order.

    `room` is in bytes.
    """

    room: int
    counts: CacheCounts

    def likely(self, layer: int, tokens: int = 1) -> Sequence[int]:
        """Experts of a layer to be read while its router has not spoken, the likeliest first. Nothing is done yet."""

    def bring(self, layer: int, expert: int) -> Sequence[Expert]:
        """Keep an expert that was read ahead; returns the experts in whose room it is."""

    def choose(self, layer: int, choices: Chosen) -> Sequence[Use]:
        """Uses of the experts that the routers of a step's tokens have chosen, each expert once: a prompt is computed
        expert by expert.

        Experts in memory come first. So if a step needs more experts than fit, each is read once:
        it replaces one that the step no longer needs.
        """


def _distinct(choices: Chosen) -> list[int]:
    experts: list[int] = np.unique(choices).tolist()
    return experts


@dataclass(slots=True)
class LeastRecentlyUsed:
    """The baseline: reads missing experts, and evicts the least recently used ones.

    `room` is in bytes, for experts of `sizes` [layers, experts].
    """

    room: int
    sizes: Sizes
    counts: CacheCounts = field(default_factory=CacheCounts)
    _resident: OrderedDict[Expert, None] = field(default_factory=OrderedDict)
    _resident_bytes: int = 0

    def likely(self, layer: int, tokens: int = 1) -> Sequence[int]:
        return ()

    def bring(self, layer: int, expert: int) -> Sequence[Expert]:
        victims, size = [], int(self.sizes[layer, expert])
        while self._resident and self._resident_bytes + size > self.room:
            victims.append(self._resident.popitem(last=False)[0])
            self._resident_bytes -= int(self.sizes[victims[-1]])
        self._resident[layer, expert] = None
        self._resident_bytes += size
        self.counts.bytes_read += size
        return victims

    def choose(self, layer: int, choices: Chosen) -> Sequence[Use]:
        experts = _distinct(choices)
        uses = [Use((layer, expert)) for expert in experts if (layer, expert) in self._resident]
        missing = [expert for expert in experts if (layer, expert) not in self._resident]
        self.counts.needed += len(experts)
        self.counts.hits += len(uses)
        for use in uses:
            self._resident.move_to_end(use.expert)
        uses += [Use((layer, expert), True, tuple(self.bring(layer, expert))) for expert in missing]
        return uses


@dataclass(slots=True)
class _Seen:
    """Choices of the routers of the last two layers, for each token of a step."""

    last: Chosen | None = None
    earlier: Chosen | None = None

    def of(self, tokens: int) -> tuple[Chosen | None, Chosen | None]:
        """The same for a step of `tokens` tokens; of a longer step before it, the last tokens are used."""
        last, earlier = (
            rows[-tokens:] if rows is not None and len(rows) >= tokens else None for rows in (self.last, self.earlier)
        )
        return last, earlier


@dataclass(slots=True)
class ForecastCache:
    """Reads ahead the experts that the table predicts, and evicts the one that is needed last.

    `room` is in bytes, for experts of `sizes` [layers, experts]. At most `most_ahead` experts of a layer are read
    ahead, the likeliest first, each at least `least_likely`. It reads none ahead once it has read
    nearly as much as least-recently-used would have. A wrong guess is a wasted read, and better
    eviction pays for all of them.
    """

    room: int
    sizes: Sizes
    table: ExpertTable
    most_ahead: int = MOST_AHEAD
    least_likely: float = 0.5
    counts: CacheCounts = field(default_factory=CacheCounts)
    _plain: LeastRecentlyUsed = field(init=False)
    _resident: NDArray[np.bool_] = field(init=False)
    _resident_bytes: int = 0
    _share: NDArray[np.float64] = field(init=False)
    _history: _Seen = field(default_factory=_Seen)

    def __post_init__(self) -> None:
        self._plain = LeastRecentlyUsed(self.room, self.sizes)
        self._resident = np.zeros((self.table.layers, self.table.experts), dtype=bool)
        self._share = 1.0 / (1.0 + np.exp(-self.table.base.astype(np.float64)))

    def likely(self, layer: int, tokens: int = 1) -> Sequence[int]:
        if self.most_ahead == 0:
            return ()
        spare = _SPENT * self._plain.counts.bytes_read - self.counts.bytes_read
        forecast = self.table.forecast(layer, *self._history.of(tokens))
        experts: list[int] = []
        for expert in np.argsort(-forecast)[: self.most_ahead].tolist():
            if forecast[expert] < self.least_likely:
                break
            spare -= 0 if self._resident[layer, expert] else int(self.sizes[layer, expert])
            if spare < 0:
                break
            if not self._resident[layer, expert]:
                experts.append(expert)
        return experts

    def bring(self, layer: int, expert: int) -> Sequence[Expert]:
        forecast = self.table.forecast(layer, *self._history.of(1))
        return self._load(layer, expert, layer, forecast, [expert])

    def choose(self, layer: int, choices: Chosen) -> Sequence[Use]:
        self._plain.choose(layer, choices)
        experts = _distinct(choices)
        uses = [Use((layer, expert)) for expert in experts if self._resident[layer, expert]]
        missing = [expert for expert in experts if not self._resident[layer, expert]]
        self.counts.needed += len(experts)
        self.counts.hits += len(uses)
        following = (layer + 1) % self.table.layers
        before, _ = self._history.of(len(choices))
        forecast = self.table.forecast(following, choices, before)
        # The experts of this step stay if possible: its reads and products overlap.
        kept_experts = experts if int(self.sizes[layer, experts].sum()) <= self.room else []
        for expert in missing:
            victims = self._load(layer, expert, following, forecast, [*kept_experts, expert])
            uses.append(Use((layer, expert), True, victims))
        share = self._share[layer]
        counted = np.bincount(choices.ravel(), minlength=len(share)) / len(choices)
        share += (1.0 - (1.0 - _RECENT) ** len(choices)) * (counted - share)
        self._history = _Seen(choices, before)
        return uses

    def _load(
        self, layer: int, expert: int, following: int, forecast: NDArray[np.float32], kept_experts: list[int]
    ) -> tuple[Expert, ...]:
        """Make room for an expert; returns the experts that go."""
        size = int(self.sizes[layer, expert])
        victims = (
            self._let_go(size, following, forecast, layer, kept_experts)
            if self._resident_bytes + size > self.room
            else ()
        )
        self._resident[layer, expert] = True
        self._resident_bytes += size
        self.counts.bytes_read += size
        return victims

    def _let_go(
        self, size: int, following: int, forecast: NDArray[np.float32], layer: int, kept_experts: list[int]
    ) -> tuple[Expert, ...]:
        """Evict the resident experts whose next use is expected last, as many as necessary; counted
        in turns of layers.

        A layer comes after as many turns as it is away, and its expert is chosen then with its share, or again a round
        later. For the next layer the forecast is known.
        """
        layers, experts = self.table.layers, self.table.experts
        distance = (np.arange(layers) - following) % layers
        rounds = 1.0 / np.maximum(self._share, _LEAST_SHARE) - 1.0
        # If it is not chosen in this round, it waits a whole round and the expected time from there on.
        rounds[following] = (1.0 - forecast) * (1.0 + rounds[following])
        expected = distance[:, None] + layers * rounds
        expected[layer, kept_experts] = np.minimum(expected[layer, kept_experts], -1.0)
        expected[~self._resident] = -2.0
        victims: list[Expert] = []
        while self._resident_bytes + size > self.room and self._resident.any():
            place = divmod(int(expected.argmax()), experts)
            victims.append(place)
            expected[place] = -2.0
            self._resident[place] = False
            self._resident_bytes -= int(self.sizes[place])
        return tuple(victims)
