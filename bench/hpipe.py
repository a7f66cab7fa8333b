"""What else HPipe has, to compare with: its recurrence for any slicing, and its split of layers over devices.

(docs/papers.md#slices-of-long-prompts)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgeshard.planning.costs.slicing import SliceTimes

StageSeconds = Callable[[int, int], float]
"""(first unit, units) -> seconds of one slice on a device."""
CommSeconds = Callable[[int], float]
"""(units) -> seconds of one slice from a device to the next."""


def slice_times(
    devices: Sequence[StageSeconds], units: int, comm: Sequence[CommSeconds] | CommSeconds | None = None
) -> SliceTimes:
    """For the product's slicer. `comm` is one function for every hop or one for each."""
    count = len(devices)
    hops = list(comm) if isinstance(comm, Sequence) else [comm] * (count - 1)
    work = np.zeros((units + 1, units + 1, count))
    for start in range(units):
        for end in range(start + 1, units + 1):
            work[start, end] = [device(start, end - start) for device in devices]
    sent = np.zeros((units + 1, len(hops)))
    for length in range(1, units + 1):
        sent[length] = [0.0 if hop is None else hop(length) for hop in hops]
    return SliceTimes(work, sent)


def slicing_seconds(
    devices: Sequence[StageSeconds], lengths: Sequence[int], comm: Sequence[CommSeconds] | CommSeconds | None = None
) -> float:
    """F of the last slice on the last device: F(i, j) = max(F(i-1, j), F(i, j-1) + comm) + t(i, j)."""
    hops = list(comm) if isinstance(comm, Sequence) else [comm] * (len(devices) - 1)
    finish = [0.0] * len(devices)
    start = 0
    for length in lengths:
        arrived = 0.0
        for index, device in enumerate(devices):
            finish[index] = arrived = max(finish[index], arrived) + device(start, length)
            hop = hops[index] if index < len(hops) else None
            arrived += hop(length) if hop is not None else 0.0
        start += length
    return finish[-1]


def balanced_partition(
    unit_s: Sequence[Sequence[float]],
    unit_bytes: Sequence[float] | None = None,
    capacity_bytes: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Ends of the devices' unit ranges that make the slowest device fastest.

    A[b][m] = min over k < b of max(A[k][m-1], T(k+1, b, m)), the slowest of the first m devices with the first b units.
    `unit_s[m][u]` are device m's seconds for unit u; units may be finer than blocks (`half_layers`). Devices stay in
    order and each gets at least one unit. None when memory fits no partition or there are fewer units than devices.
    """
    seconds = np.asarray(unit_s, dtype=np.float64)
    devices, units = seconds.shape
    sizes = np.concatenate([[0.0], np.cumsum(unit_bytes if unit_bytes is not None else np.zeros(units))])
    room = np.asarray(capacity_bytes if capacity_bytes is not None else [np.inf] * devices, dtype=np.float64)
    best = np.full(units + 1, np.inf)
    best[0] = 0.0
    before = np.zeros((devices, units + 1), dtype=np.int64)
    for device in range(devices):
        total = np.concatenate([[0.0], np.cumsum(seconds[device])])
        after = np.full(units + 1, np.inf)
        for end in range(device + 1, units + 1):
            slowest = np.maximum(best[:end], total[end] - total[:end])
            slowest = np.where(sizes[end] - sizes[:end] <= room[device], slowest, np.inf)
            before[device, end] = int(np.argmin(slowest))
            after[end] = slowest[before[device, end]]
        best = after
    if not np.isfinite(best[units]):
        return None
    ends = [units]
    for device in range(devices - 1, 0, -1):
        ends.append(int(before[device, ends[-1]]))
    return tuple(reversed(ends))


def half_layers(attention: Sequence[float], mlp: Sequence[float]) -> tuple[float, ...]:
    """Seconds or bytes of half layers, in order: attention and MLP of each block."""
    return tuple(value for pair in zip(attention, mlp, strict=True) for value in pair)
