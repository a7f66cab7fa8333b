"""The instance as the walk solvers see it: *kinds* of nodes instead of nodes, and windows instead
of memory. Pure.

A kind is a set of indistinguishable nodes (`classes`), or one node (`general`). A plan is a walk
over (layers done, kind) that visits a kind at most as often as it has nodes. Compute and memory
only grow with the layers of a stage. So the layers that a node may hold from layer n on are a
window, `reach[kind, n]` its last end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from edgeshard.planning.solvers.instance import Floats, Instance
from edgeshard.planning.solvers.scoring import SLACK, within

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Kinds:
    """members[c] are the nodes of kind c; kind 0 is only the source."""

    members: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> Integers:
        return np.array([len(nodes) for nodes in self.members], dtype=np.int64)

    def split(self, mark: Callable[[int], Hashable]) -> Kinds:
        """Each kind in parts whose nodes have the same mark."""
        members: list[tuple[int, ...]] = []
        for nodes in self.members:
            groups: dict[Hashable, list[int]] = {}
            for node in nodes:
                groups.setdefault(mark(node), []).append(node)
            members += map(tuple, groups.values())
        return Kinds(tuple(members))


def single_kinds(instance: Instance) -> Kinds:
    """Every node its own kind, but nodes that can never be a stage are left out."""
    return Kinds(((instance.source,), *((node,) for node in instance.others)))


def equal_kinds(instance: Instance, most: int) -> Kinds | None:
    """Nodes that may be swapped without changing anything, as kinds; None when there are more than
    `most`."""
    members: list[tuple[int, ...]] = [(instance.source,)]
    remaining = np.array(instance.others, dtype=np.int64)
    while remaining.size:
        if len(members) > most:
            return None
        same = _swappable(instance, int(remaining[0]), remaining)
        members.append(tuple(int(node) for node in remaining[same]))
        remaining = remaining[~same]
    return Kinds(tuple(members))


def _swappable(instance: Instance, one: int, others: Integers) -> Booleans:
    """Which of `others` may be swapped with node `one`: equal in themselves and towards every third
    node."""
    same = np.ones(len(others), dtype=bool)
    for table in (
        instance.embed_s,
        instance.head_s,
        instance.overhead_s,
        instance.capacity_bytes,
        instance.max_layers,
    ):
        same &= table[others] == table[one]
    same &= (instance.compute_s[others] == instance.compute_s[one]).all(axis=1)
    peers, rows = others[same], np.flatnonzero(same)
    back = instance.return_s[:, instance.source]
    equal = back[peers] == back[one]
    for table in (instance.hop_s, instance.latency_s):
        for links in (table, table.T):
            different = links[peers] != links[one]
            count = (
                different.sum(axis=1) - different[:, one] - different[np.arange(len(peers)), peers]
            )
            equal &= (count == 0) & ((links[peers, one] == links[one, peers]) | (peers == one))
    equal[peers == one] = True
    same[rows[~equal]] = False
    return same


class Problem:
    """One question: least R with every station <= `threshold_s`, over kinds.

    Arrays over kinds C and layers N: `done` [C, N+1] compute of the first n layers; `reach` [C,
    N+1] the last end of a middle stage that starts at n, at most n when it can hold none; `finish`
    [C, N+1] seconds of a last stage that starts at n, with the return, infinite when impossible;
    `first` [N+1] the source's stage by its end; `occupied` [C, C] seconds on a link and `hop` [C,
    C] the same with its delay, infinite when not allowed; `alone` the seconds of the source with
    everything.
    """

    def __init__(self, instance: Instance, kinds: Kinds, threshold_s: float) -> None:
        self.instance = instance
        self.kinds = kinds
        self.threshold_s = threshold_s
        self.limit = threshold_s * (1 + SLACK)
        self.layers, self.count = instance.layers, len(kinds.members)
        self.representative = np.array([nodes[0] for nodes in kinds.members], dtype=np.int64)
        self.sizes = kinds.sizes
        first_nodes = self.representative
        self.done: Floats = np.concatenate(
            [np.zeros((self.count, 1)), np.cumsum(instance.compute_s[first_nodes], axis=1)], axis=1
        )
        self._held = np.concatenate([[0.0], np.cumsum(instance.layer_bytes)])
        self.overhead: Floats = instance.overhead_s[first_nodes]
        self._links()
        self._stages()

    def _links(self) -> None:
        """Between kinds; inside a kind, the link of two of its members. Nothing ever returns to the
        source by a hop."""
        instance = self.instance
        second = np.array([nodes[min(1, len(nodes) - 1)] for nodes in self.kinds.members])
        occupied = instance.hop_s[np.ix_(self.representative, self.representative)].copy()
        delay = instance.latency_s[np.ix_(self.representative, self.representative)].copy()
        inside = np.arange(self.count)
        occupied[inside, inside] = instance.hop_s[self.representative, second]
        delay[inside, inside] = instance.latency_s[self.representative, second]
        occupied[inside[self.sizes < 2], inside[self.sizes < 2]] = INFINITY
        occupied[:, 0] = INFINITY
        occupied[occupied > self.limit] = INFINITY
        self.occupied: Floats = occupied
        self.hop: Floats = occupied + delay
        back = instance.return_s[self.representative, instance.source]
        self._back_station = np.where(back > self.limit, INFINITY, back)
        self._back = self._back_station + instance.latency_s[self.representative, instance.source]

    def _stages(self) -> None:
        instance, layers = self.instance, self.layers
        source, at_source = instance.source, instance.head_on_source
        capacity = instance.capacity_bytes[self.representative] * (1 + SLACK)
        most = instance.max_layers[self.representative]
        # When sending is part of the station, a stage leaves room for at least its quickest way
        # out.
        out = np.zeros(self.count)
        if not instance.asynchronous:
            out = np.minimum(self.occupied.min(axis=1), self._back_station)
        # Without a way out, or any at this threshold, a node is no stage but the last.
        can_send = np.isfinite(out)
        out[~can_send] = 0.0
        time_left = np.where(can_send, self.limit - self.overhead - out, -INFINITY)
        room = capacity - instance.stage_bytes
        starts = np.arange(layers + 1)
        self.reach: Integers = np.empty((self.count, layers + 1), dtype=np.int64)
        for kind in range(self.count):
            by_bytes = np.searchsorted(self._held, self._held + room[kind], side="right") - 1
            by_time = (
                np.searchsorted(self.done[kind], self.done[kind] + time_left[kind], side="right")
                - 1
            )
            reach = np.minimum(np.minimum(by_bytes, by_time), starts + most[kind])
            self.reach[kind] = np.maximum(np.minimum(reach, layers - 1), starts - 1)
        self.reach[0] = starts - 1
        head_s = 0.0 if at_source else instance.head_s[self.representative][:, None]
        head_bytes = 0.0 if at_source else instance.head_bytes
        seconds = self.overhead[:, None] + self.done[:, -1:] - self.done + head_s
        station = seconds if instance.asynchronous else seconds + self._back_station[:, None]
        need = self._held[-1] - self._held + head_bytes
        ok = (
            (need[None] <= room[:, None])
            & (station <= self.limit)
            & (layers - starts[None] <= most[:, None])
        )
        ok[:, [0, layers]] = False
        ok[0] = False
        self.finish: Floats = np.where(ok, seconds + self._back[:, None], INFINITY)
        both = instance.embed_bytes + instance.head_bytes - instance.tied_bytes
        seconds_first = self.overhead[0] + instance.embed_s[source] + self.done[0]
        first_s = seconds_first + (instance.head_s[source] if at_source else 0.0)
        fits = (self._held + (both if at_source else instance.embed_bytes) <= room[0]) & (
            starts <= most[0]
        )
        fits &= (first_s + out[0] <= self.limit) & can_send[0]
        fits[[0, layers]] = False
        self.first: Floats = np.where(fits, first_s, INFINITY)
        alone = float(seconds_first[-1] + instance.head_s[source])
        allowed = instance.min_nodes <= 1 <= instance.max_nodes and within(alone, self.threshold_s)
        allowed = allowed and self._held[-1] + both <= room[0] and layers <= most[0]
        self.alone = alone if allowed else INFINITY

    def restrict(self, other: Problem) -> None:
        """Leave out the stages and links that another problem of the same nodes, layers and memory
        does not have.

        If sending is part of a station, the remainder may be more than the other problem allows,
        never less.
        """
        self.reach = np.minimum(self.reach, other.reach)
        missing = np.isinf(other.occupied)
        self.occupied = np.where(missing, INFINITY, self.occupied)
        self.hop = np.where(missing, INFINITY, self.hop)
        self.first = np.where(np.isinf(other.first), INFINITY, self.first)
        self.finish = np.where(np.isinf(other.finish), INFINITY, self.finish)
        self.alone = INFINITY if np.isinf(other.alone) else self.alone

    @property
    def has_room(self) -> bool:
        """Whether all nodes together have room for the layers, each at its best place; without that
        there is no walk of several stages."""
        return float(self.most_layers @ self.sizes) >= self.layers

    @cached_property
    def most_layers(self) -> Integers:
        """[C] layers that a node holds at the most, wherever its stage begins."""
        starts = np.arange(self.layers + 1)
        last = np.where(np.isfinite(self.finish), self.layers - starts, 0).max(axis=1)
        most = np.maximum((self.reach - starts).max(axis=1), last)
        most[0] = np.flatnonzero(np.isfinite(self.first)).max(initial=0)
        return np.asarray(np.maximum(most, 0))

    @cached_property
    def widest(self) -> int:
        """The most layers any middle stage can hold."""
        return int(max(0, (self.reach - np.arange(self.layers + 1)[None, :]).max()))

    @cached_property
    def windows(self) -> Floats:
        """[N, widest, C] seconds of a middle stage by start, layers - 1 and kind; infinite outside
        its window."""
        table = np.full((self.layers, max(1, self.widest), self.count), INFINITY)
        starts = np.arange(self.layers)
        for width in range(1, self.widest + 1):
            ends = np.minimum(starts + width, self.layers)
            seconds = self.overhead[:, None] + self.done[:, ends] - self.done[:, starts]
            inside = (starts[None] + width <= self.reach[:, starts]) & (starts[None] >= 1)
            table[:, width - 1, :] = np.where(inside, seconds, INFINITY).T
        return table
