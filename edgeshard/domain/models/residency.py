"""The weights of a stage that stay in memory and those read from the disk in every step. Pure;
sizes in bytes.

If everything except a mixture's experts fits, with two experts, the remaining memory caches experts
(docs/papers/agent.md#experts-on-the-disk). Otherwise whole layers pass.

Streamed layers pass through slots: while one computes, the next ones are read into the others
(ZeRO-Inference). Layers that stay are spread evenly among those that do not, so that the disk reads
on while they compute. (docs/papers.md#nodes-that-stream)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.errors import ResourceExhaustedError

PREFETCHED_LAYERS = 1
"""Layers that are read ahead: p of ZeRO-Inference; there is one slot more, for the layer that
computes."""


DISK_BLOCK_BYTES = 4096
"""A unit is read into memory, and takes it, in whole blocks of a disk."""


def in_disk_blocks(size: int) -> int:
    """`size` in whole blocks."""
    return -(-size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


def caches_experts(room: Any, largest: Any, total: Any) -> Any:
    """Whether experts of a stage are cached, one by one, in the `room` that all its other weights
    leave.

    The `largest` expert and the `total` of all are in whole blocks. Numbers, or numpy arrays of
    them.
    """
    return (2 * largest <= room) & (room < total)  # one computes while one is read


def cache_bytes(room: Any, largest: Any) -> Any:
    """The part of that room for the cache; the rest is for the expert that is read ahead."""
    return room - largest


def room_for_experts(others: int, experts: Sequence[int], budget: int | None) -> int | None:
    """Memory for the cache of a stage's experts in `budget`, after all other weights, `others`.

    None if all of them fit, if there are none, or if whole layers must pass.
    """
    if budget is None or not experts:
        return None
    room, sizes = budget - others, [in_disk_blocks(size) for size in experts]
    largest = max(sizes)
    return int(cache_bytes(room, largest)) if caches_experts(room, largest, sum(sizes)) else None


@dataclass(frozen=True, slots=True)
class Residency:
    """For each layer of a stage, in order: whether it stays in memory. The others pass through
    `slots` slots."""

    resident: tuple[bool, ...]
    slots: int
    resident_bytes: int
    """Memory of weights: layers that stay, slots, and all that is no layer."""
    streamed_bytes: int
    """Bytes that every step reads."""

    @property
    def streams(self) -> bool:
        return self.slots > 0


def choose_residency(
    layers: Sequence[int], others: int, budget: int | None, prefetched: int = PREFETCHED_LAYERS
) -> Residency:
    """As many layers in memory as `budget` allows; all of them if it is None.

    `layers` are the bytes of each layer and `others` the bytes of embedding and head, which stay.
    Raises ResourceExhaustedError, with the missing bytes, if even the slots do not fit.
    """
    whole = sum(layers)
    if budget is None or whole + others <= budget:
        return Residency((True,) * len(layers), 0, whole + others, 0)
    slots = 1 + prefetched
    fixed = others + slots * max(layers)
    if fixed > budget:
        raise ResourceExhaustedError.about(
            "weight_budget",
            f"{budget} bytes are too few by {fixed - budget}: embedding and head take {others}, "
            "and "
            f"{slots} slots for layers of up to {max(layers)} take the rest; give this node more "
            "or fewer layers",
            "WEIGHT_BUDGET",
        )
    resident = _spread(layers, budget - fixed)
    resident_bytes = sum(size for size, stays in zip(layers, resident, strict=True) if stays)
    return Residency(resident, slots, fixed + resident_bytes, whole - resident_bytes)


def _spread(layers: Sequence[int], room: int) -> tuple[bool, ...]:
    """As many layers as fit into `room` if spread evenly: the largest count for which they do."""
    for count in range(len(layers) - 1, 0, -1):
        indices = {(2 * index + 1) * len(layers) // (2 * count) for index in range(count)}
        if sum(layers[index] for index in indices) <= room:
            return tuple(index in indices for index in range(len(layers)))
    return (False,) * len(layers)
