"""The planner's bench problems, made from a seed: many boxes in few classes, or every link its own."""

from __future__ import annotations

import numpy as np

from edgeshard.planning.instance import Floats, Instance

LAYERS = 80


def _instance(rng: np.random.Generator, speed_s: Floats, rooms: Floats, hop_s: Floats, latency_s: Floats) -> Instance:
    """Equal blocks of one memory unit each; boxes differ in seconds per block, in room and in all their links."""
    boxes = len(speed_s)
    return Instance(
        compute_s=np.repeat(speed_s[:, None], LAYERS, axis=1),
        embed_s=np.full(boxes, 1e-4),
        head_s=speed_s * 0.7,
        overhead_s=np.full(boxes, 2e-4),
        hop_s=hop_s,
        return_s=hop_s / 100,
        latency_s=latency_s,
        layer_bytes=np.ones(LAYERS),
        embed_bytes=0.2,
        head_bytes=0.2,
        tied_bytes=0.0,
        stage_bytes=0.05,
        capacity_bytes=rooms,
        max_layers=np.full(boxes, LAYERS, dtype=np.int64),
    )


def arbitrary(seed: int, boxes: int = 100, memory: float = 1.5) -> Instance:
    """Asymmetric links between any two boxes; in all, memory for `memory` times the layers; speeds over a decade."""
    rng = np.random.default_rng(seed)
    speed_s = 10 ** rng.uniform(-3, -2, boxes)
    rooms = rng.dirichlet(np.full(boxes, 3.0)) * LAYERS * memory
    rooms[0] = max(rooms[0], 1.5)
    # Whole layers count: scale until the boxes hold `memory` times the layers, not `memory` times the bytes.
    rooms *= LAYERS * memory / np.floor(rooms).sum()
    hop_s = 10 ** rng.uniform(-3.3, -1.3, (boxes, boxes))
    latency_s = rng.uniform(1e-4, 2e-3, (boxes, boxes))
    return _instance(rng, speed_s, rooms, hop_s, latency_s)


def classed(seed: int, sizes: tuple[int, ...], room: float = 4.0) -> Instance:
    """Classes of `sizes` boxes, the quicker the fewer, with room for about `room` layers a box; box 0 is the source."""
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(len(sizes)), sizes)
    by_size = np.argsort(np.argsort(-np.array(sizes), kind="stable"), kind="stable")
    speed_s = np.sort(10 ** rng.uniform(-3, -2, len(sizes)))[::-1][by_size]
    rooms = np.maximum(1.3, rng.uniform(0.5, 1.5, len(sizes)) * room)
    hop_s = 10 ** rng.uniform(-3.3, -1.7, (len(sizes), len(sizes)))
    latency_s = rng.uniform(1e-4, 2e-3, (len(sizes), len(sizes)))
    spread = np.ix_(classes, classes)
    return _instance(rng, speed_s[classes], rooms[classes], hop_s[spread], latency_s[spread])
