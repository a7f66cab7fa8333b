"""HPipe's split of layers over devices in order, to compare with
(docs/papers.md#slices-of-long-prompts)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balanced_partition(
    unit_s: Sequence[Sequence[float]],
    unit_bytes: Sequence[float] | None = None,
    capacity_bytes: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Ends of the devices' unit ranges that make the slowest device fastest.

    A[b][m] = min over k < b of max(A[k][m-1], T(k+1, b, m)), the slowest of the first m devices
    with the first b units. `unit_s[m][u]` are device m's seconds for unit u; units may be finer
    than blocks. Devices stay in order and each gets at least one unit. None when memory fits no
    partition or there are fewer units than devices.
    """
    seconds = np.asarray(unit_s, dtype=np.float64)
    devices, units = seconds.shape
    sizes = np.concatenate(
        [[0.0], np.cumsum(unit_bytes if unit_bytes is not None else np.zeros(units))]
    )
    room = np.asarray(
        capacity_bytes if capacity_bytes is not None else [np.inf] * devices, dtype=np.float64
    )
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
