"""Experts of a mixture on storage: a forecast of those that a router will choose, and a cache of
them in memory.

The cache decides which ones are read ahead, and which one goes when room is needed. Pure.

A token passes the mixtures in order, again and again. So the value of an expert's place follows
from two things (EdgeMoE's frequency and distance). They are the distance to its layer's next turn,
and how often the router there chooses it. The one whose next use is expected last goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeshard.domain.errors import InvalidArgumentError

Floats = NDArray[np.float32]
Choices = NDArray[np.int16]
"""[tokens, layers, chosen]: the experts that each token's routers chose, in the order of the
text."""

Chosen = NDArray[np.int16]
"""[tokens, chosen]: the same of one layer."""

_BASE = "base"
_LAST = "last"
_EARLIER = "earlier"


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """EdgeMoE's predictor, from the choices in the two layers before.

    There the table's key is the experts of both layers together. With many experts most keys are
    never seen. So each expert of either layer has its own entry here, and entries add up.
    `bench/training/expert_learning.py` learns them from recorded routing.

    Log-odds that an expert is chosen: `base` [layers, experts], and the addends for each expert
    of the layer before, `last` [layers, experts before, experts], and of the one before that,
    `earlier`.

    Layers count mixtures only. Before the first one come the last two of the token before.
    """

    base: Floats
    last: Floats
    earlier: Floats

    @property
    def layers(self) -> int:
        return len(self.base)

    @property
    def experts(self) -> int:
        return len(self.base[0])

    def forecast(self, layer: int, last: Chosen | None, earlier: Chosen | None) -> Floats:
        """Probability [experts] that some token's router chooses each expert of a layer.

        `last` and `earlier` [tokens, chosen] are the choices of the tokens' routers in the two
        layers before; None if unknown.
        """
        odds = self.base[layer]
        if last is not None:
            odds = odds + self.last[layer, last].sum(1)
        if earlier is not None:
            odds = odds + self.earlier[layer, earlier].sum(1)
        single = probability(np.atleast_2d(odds))
        result: Floats = single[0] if len(single) == 1 else 1.0 - (1.0 - single).prod(0)
        return result

    def part(self, first: int, end: int) -> ExpertTable:
        """The table of some of the layers; choices of other layers are not known there."""
        if (first, end) == (0, self.layers):
            return self
        last, earlier = self.last[first:end].copy(), self.earlier[first:end].copy()
        last[:1] = 0.0
        earlier[:2] = 0.0
        return ExpertTable(self.base[first:end], last, earlier)

    @classmethod
    def even(cls, layers: int, experts: int) -> ExpertTable:
        """One that knows nothing: every expert is as likely as another."""
        square = np.zeros((layers, experts, experts), np.float32)
        return cls(
            np.full((layers, experts), -np.log(max(1, experts - 1)), np.float32), square, square
        )

    def values(self) -> dict[str, list[Any]]:
        """The table in the form stored next to the model, in hundredths."""
        parts = {_BASE: self.base, _LAST: self.last, _EARLIER: self.earlier}
        return {name: np.rint(100 * part).astype(int).tolist() for name, part in parts.items()}

    @classmethod
    def of_values(cls, values: Mapping[str, list[Any]], layers: int, experts: int) -> ExpertTable:
        """Raises InvalidArgumentError if they do not fit a model with this number of mixtures and
        experts."""
        shapes = {
            _BASE: (layers, experts),
            _LAST: (layers, experts, experts),
            _EARLIER: (layers, experts, experts),
        }
        parts: list[Floats] = []
        for name, shape in shapes.items():
            try:
                with np.errstate(over="ignore"):  # an infinity is refused below
                    part = np.array(values[name], dtype=np.float32) / np.float32(100)
            except (KeyError, TypeError, ValueError, OverflowError):
                part = np.zeros(0, dtype=np.float32)
            if part.shape != shape or not np.isfinite(part).all():
                raise InvalidArgumentError(
                    f"expert table: {name} must be finite numbers of shape {shape}", field=name
                )
            parts.append(part)
        return cls(*parts)


def probability(odds: Floats) -> Floats:
    """Probabilities of log-odds."""
    result: Floats = (1.0 / (1.0 + np.exp(-np.clip(odds, -30.0, 30.0)))).astype(np.float32)
    return result


Expert = tuple[int, int]
"""(mixture, expert), both from 0."""
Sizes = NDArray[np.int64]
"""[layers, experts]: bytes of each expert."""

MOST_AHEAD = 3
# How much one token weighs in the share of tokens that choose an expert: about the last hundred
# count.
_RECENT = 0.01
_LEAST_SHARE = 1e-4
# Fraction of the bytes that least-recently-used has read; the rest is for later misses that it does
# not have.
_SPENT = 0.99


@dataclass(slots=True)
class CacheCounts:
    """Counts of a cache: experts that steps needed, how many of them were in memory, and bytes read
    from storage."""

    needed: int = 0
    hits: int = 0
    bytes_read: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.needed if self.needed else 0.0


@dataclass(frozen=True, slots=True)
class Use:
    """An expert that is used now. `load`: it is to be read first, in the room of the experts in
    `victims`."""

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
        """Experts of a layer to be read while its router has not spoken, the likeliest first.
        Nothing is done yet."""

    def bring(self, layer: int, expert: int) -> Sequence[Expert]:
        """Keep an expert that was read ahead; returns the experts in whose room it is."""

    def choose(self, layer: int, choices: Chosen) -> Sequence[Use]:
        """Uses of the experts that the routers of a step's tokens have chosen, each expert once: a
        prompt is computed expert by expert.

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
        """The same for a step of `tokens` tokens; of a longer step before it, the last tokens are
        used."""
        last, earlier = (
            rows[-tokens:] if rows is not None and len(rows) >= tokens else None
            for rows in (self.last, self.earlier)
        )
        return last, earlier


@dataclass(slots=True)
class ForecastCache:
    """Reads ahead the experts that the table predicts, and evicts the one that is needed last.

    `room` is in bytes, for experts of `sizes` [layers, experts]. At most `most_ahead` experts of a
    layer are read ahead, the likeliest first, each at least `least_likely`. It reads none ahead
    once it has read nearly as much as least-recently-used would have. A wrong guess is a wasted
    read, and better eviction pays for all of them.
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
        self,
        layer: int,
        expert: int,
        following: int,
        forecast: NDArray[np.float32],
        kept_experts: list[int],
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
        self,
        size: int,
        following: int,
        forecast: NDArray[np.float32],
        layer: int,
        kept_experts: list[int],
    ) -> tuple[Expert, ...]:
        """Evict the resident experts whose next use is expected last, as many as necessary; counted
        in turns of layers.

        A layer comes after as many turns as it is away, and its expert is chosen then with its
        share, or again a round later. For the next layer the forecast is known.
        """
        layers, experts = self.table.layers, self.table.experts
        distance = (np.arange(layers) - following) % layers
        rounds = 1.0 / np.maximum(self._share, _LEAST_SHARE) - 1.0
        # If it is not chosen in this round, it waits a whole round and the expected time from there
        # on.
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
