"""HPipe's recurrence for any slicing of a prompt (docs/papers.md#slices-of-long-prompts)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgeshard.planning.costs.slicing import SliceTimes

StageSeconds = Callable[[int, int], float]
"""(first unit, units) -> seconds of one slice on a device."""
CommSeconds = Callable[[int], float]
"""(units) -> seconds of one slice from a device to the next."""


def slice_times(
    devices: Sequence[StageSeconds],
    units: int,
    comm: Sequence[CommSeconds] | CommSeconds | None = None,
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
    devices: Sequence[StageSeconds],
    lengths: Sequence[int],
    comm: Sequence[CommSeconds] | CommSeconds | None = None,
) -> float:
    """F of the last slice on the last device: F(i, j) = max(F(i-1, j), F(i, j-1) + comm) + t(i,
    j)."""
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
