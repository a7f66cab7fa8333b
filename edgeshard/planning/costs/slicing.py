"""HPipe: into which slices a long prompt is cut. Pure. (docs/papers.md#slices-of-long-prompts)

A slice waits on a device for the slice before it and for its own arrival from the device before:
F(i, j) = max(F(i-1, j), F(i, j-1) + comm) + t(i, j). Because a slice attends to all before it, t
grows with its start, so good slices get shorter towards the end. Lengths are in units of the
caller's choice, such as 64 tokens.

In the recurrence a hop only delays. A link slow enough to be a bottleneck goes in as one more
"device".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeshard.domain.errors import invalid
from edgeshard.planning.solvers.instance import Floats

_CEILINGS = 128
"""Ceilings of the slice time tried, spread over all there are: each costs a DP, and only their
spread matters."""
_SLACK = 1e-12


@dataclass(frozen=True, slots=True)
class Slices:
    """Lengths in units, in order. `ttft_s` is F of the last slice on the last device. `exact`: no
    slicing is better."""

    lengths: tuple[int, ...]
    ttft_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """work_s [units + 1, units + 1, devices] of the slice from a to b, 0 if b <= a; comm_s [units +
    1, devices - 1] by length. Raises InvalidArgumentError for an impossible time."""

    work_s: Floats
    comm_s: Floats

    def __post_init__(self) -> None:
        hops, devices = self.comm_s.shape[1], self.work_s.shape[2]
        if hops != devices - 1:
            raise invalid(
                "comm", f"has {hops} hops for {devices} devices; it must have {devices - 1}"
            )
        for times in (self.work_s, self.comm_s):
            if not np.isfinite(times).all() or times.min(initial=0) < 0:
                raise invalid("devices", "gave a time that is negative or not finite")

    @property
    def units(self) -> int:
        return int(self.work_s.shape[0]) - 1


def best_slices(times: SliceTimes, label_limit: int = 20_000) -> Slices:
    """The slicing with the least F.

    Ceilings on a slice's time are tried one after the other, each with a DP over slice ends, as in
    HPipe. This gives an incumbent. Then labels (the devices' finish times at a slice end) are
    extended. A label that is no better than another on every device is dropped. This is exact
    because F grows with each finish time. More than `label_limit` labels end the search; it then
    returns the incumbent with `exact` False.
    """
    lengths, value = _by_ceilings(times)
    label_lengths = _by_labels(times, value, label_limit)
    if label_lengths is None:
        return Slices(lengths, value, exact=False)
    if label_lengths and (better := _recurrence(times, label_lengths)) < value * (1 - _SLACK):
        lengths, value = label_lengths, better
    return Slices(_longest_first(times, lengths, value), value, exact=True)


def _step(times: SliceTimes, finish: Sequence[float], start: int, end: int) -> tuple[float, ...]:
    """Finish times of the slice [start, end) on each device after the previous slice's."""
    arrived, finish_times = 0.0, []
    work, comm = times.work_s[start, end], times.comm_s[end - start]
    for device, before in enumerate(finish):
        arrived = max(before, arrived) + float(work[device])
        finish_times.append(arrived)
        if device < len(comm):
            arrived += float(comm[device])
    return tuple(finish_times)


def _recurrence(times: SliceTimes, lengths: Sequence[int]) -> float:
    finish: tuple[float, ...] = (0.0,) * times.work_s.shape[2]
    start = 0
    for length in lengths:
        finish = _step(times, finish, start, start + length)
        start += length
    return finish[-1]


def _recurrences(times: SliceTimes, slicings: Sequence[tuple[int, ...]]) -> list[float]:
    """`_recurrence` of many slicings at once."""
    most = max(map(len, slicings), default=0)
    ends = np.cumsum([(*lengths, *(0,) * (most - len(lengths))) for lengths in slicings], axis=1)
    finish = np.zeros((len(slicings), times.work_s.shape[2]))
    start = np.zeros(len(slicings), dtype=np.int64)
    for end in ends.T:
        more = end > start
        arrived = np.zeros(len(slicings))
        for device in range(finish.shape[1]):
            arrived = np.maximum(finish[:, device], arrived) + times.work_s[start, end, device]
            finish[more, device] = arrived[more]
            if device < finish.shape[1] - 1:
                arrived = arrived + times.comm_s[end - start, device]
        start = end
    return [float(seconds) for seconds in finish[:, -1]]


def _by_ceilings(times: SliceTimes) -> tuple[tuple[int, ...], float]:
    """The slicing of least total work under each ceiling on a slice's time; returns the best by
    F."""
    units = times.units
    longest = times.work_s.max(axis=2)
    starts, ends = np.triu_indices(units + 1, 1)
    ceilings = np.unique(longest[starts, ends])
    if len(ceilings) > _CEILINGS:
        ceilings = ceilings[np.linspace(0, len(ceilings) - 1, _CEILINGS).round().astype(int)]
    best: tuple[int, ...] = (units,)
    value = _recurrence(times, best)
    before = _before(longest, ceilings)
    slicings = {_trace(row, units) for row in before if row[units] >= 0}
    slicings |= {_greedy(longest, float(ceiling)) for ceiling in ceilings} - {()}
    shortest_first = sorted(slicings, key=len)
    for lengths, seconds in zip(shortest_first, _recurrences(times, shortest_first), strict=True):
        if seconds < value * (1 - _SLACK):
            best, value = lengths, seconds
    return best, value


def _before(longest: Floats, ceilings: Floats) -> npt.NDArray[np.int64]:
    """[ceilings, units + 1]: where the last slice of the least work up to an end begins; -1 if
    there is none."""
    units = len(longest) - 1
    total = np.full((len(ceilings), units + 1), np.inf)
    total[:, 0] = 0.0
    before = np.full((len(ceilings), units + 1), -1, dtype=np.int64)
    rows = np.arange(len(ceilings))
    for end in range(1, units + 1):
        allowed = longest[None, :end, end] <= ceilings[:, None]
        costs = np.where(allowed, total[:, :end] + longest[None, :end, end], np.inf)
        # The first of equal ones starts earliest: the longest last slice, so the fewest slices.
        starts = np.argmin(costs, axis=1)
        total[:, end] = costs[rows, starts]
        before[:, end] = np.where(np.isfinite(total[:, end]), starts, -1)
    return before


def _trace(before: npt.NDArray[np.int64], units: int) -> tuple[int, ...]:
    lengths: list[int] = []
    end = units
    while end:
        lengths.append(end - int(before[end]))
        end = int(before[end])
    return tuple(reversed(lengths))


def _greedy(longest: Floats, ceiling: float) -> tuple[int, ...]:
    """The longest slice under the ceiling, again and again; empty when one unit is too long."""
    units = longest.shape[0] - 1
    start = 0
    lengths = list[int]()
    while start < units:
        fitting = np.nonzero(longest[start, start + 1 :] <= ceiling * (1 + _SLACK))[0]
        if not len(fitting):
            return ()
        lengths.append(int(fitting[-1]) + 1)
        start += lengths[-1]
    return tuple(lengths)


def _by_labels(times: SliceTimes, ceiling_s: float, limit: int) -> tuple[int, ...] | None:
    """Lengths of the least F below `ceiling_s`, empty when there is none; None when the labels
    became too many."""
    units, rest = times.units, _least_rest(times)
    labels = [_Labels(times.work_s.shape[2]) for _ in range(units + 1)]
    labels[0].add(np.zeros((1, times.work_s.shape[2])), [()])
    best: tuple[int, ...] = ()
    label_count = 0
    for start in range(units):
        finish, lengths = labels[start].undominated()
        if not lengths:
            continue
        after = _steps(times, finish, start)
        for index, seconds in enumerate(after[-1, :, -1].tolist()):
            if seconds < ceiling_s * (1 - _SLACK):
                best, ceiling_s = (*lengths[index], units - start), seconds
        bound = (after + rest[start + 1 :, None, :]).max(axis=2)
        below_ceiling = bound[:-1] < ceiling_s * (1 - _SLACK)
        label_count += int(below_ceiling.sum())
        if label_count > limit:
            return None
        for length, row in enumerate(below_ceiling, start=1):
            places = np.flatnonzero(row)
            labels[start + length].add(
                after[length - 1, places], [(*lengths[one], length) for one in places]
            )
    return best


class _Labels:
    """Finish times on every device at one slice end, [labels, devices], each with the lengths that
    lead there."""

    def __init__(self, devices: int) -> None:
        self._finish: list[Floats] = [np.zeros((0, devices))]
        self._lengths: list[tuple[int, ...]] = []

    def add(self, finish: Floats, lengths: list[tuple[int, ...]]) -> None:
        if lengths:
            self._finish.append(finish)
            self._lengths += lengths

    def undominated(self) -> tuple[Floats, list[tuple[int, ...]]]:
        """The entries to which no other is equal or better on every device, in rising order."""
        finish = np.concatenate(self._finish)
        order = np.lexsort(finish.T[::-1])
        finish = finish[order]
        is_undominated = np.ones(len(finish), dtype=bool)
        for index in range(len(finish)):
            if is_undominated[index]:
                is_undominated[index + 1 :] &= (finish[index] > finish[index + 1 :]).any(axis=1)
        return finish[is_undominated], [self._lengths[one] for one in order[is_undominated]]


def _steps(times: SliceTimes, finish: Floats, start: int) -> Floats:
    """[ends, labels, devices]: `_step` of every label with every slice from `start`, the shortest
    first."""
    work, comm = times.work_s[start, start + 1 :], times.comm_s[1 : times.units - start + 1]
    after = np.empty((len(work), *finish.shape))
    arrived = np.zeros((len(work), len(finish)))
    for device in range(finish.shape[1]):
        arrived = np.maximum(finish[:, device], arrived) + work[:, device, None]
        after[:, :, device] = arrived
        if device < comm.shape[1]:
            arrived = arrived + comm[:, device, None]
    return after


def _least_rest(times: SliceTimes) -> Floats:
    """[units + 1, devices] by slice end: a lower bound on the time from that device's finish to the
    end of everything.

    A device still has its own remaining work of all units, then the last slice has to pass the
    devices after it.
    """
    units, count = times.units, times.work_s.shape[2]
    tail = np.zeros((units + 1, count))  # of the slice that begins at a and is the last
    for start in range(units):
        for device in range(count - 2, -1, -1):
            send_s = times.comm_s[units - start, device]
            tail[start, device] = (
                tail[start, device + 1] + times.work_s[start, units, device + 1] + send_s
            )
    least = np.full((units + 1, count), np.inf)
    for start in range(units - 1, -1, -1):
        least[start] = times.work_s[start, units] + tail[start]
        for end in range(start + 1, units):
            least[start] = np.minimum(least[start], times.work_s[start, end] + least[end])
    least[units] = 0.0
    return least


def _longest_first(times: SliceTimes, lengths: tuple[int, ...], value: float) -> tuple[int, ...]:
    """An equally good slicing whose slices do not grow, if there is one: fewer steps, and steadier
    ones."""
    longest = times.work_s.max(axis=2)
    ends = np.cumsum(lengths)
    ceiling = max(
        float(longest[end - length, end]) for end, length in zip(ends, lengths, strict=True)
    )
    greedy = _greedy(longest, ceiling)
    return greedy if greedy and _recurrence(times, greedy) <= value * (1 + _SLACK) else lengths
