"""Placement problems made from a seed: small ones of every sort, for the tests too, and the large ones of the bench."""

from __future__ import annotations

import numpy as np

from edgeshard.planning.instance import Floats, Instance

LAYERS = 80
RANDOM_SEEDS = range(200)
"""The small instances that the tests and `make bench` compare solvers on."""
TIGHTNESS = (1.1, 1.5, 3.0)
"""Memory over need."""


def random_micro_batches(seed: int) -> int:
    """How many micro-batches are in flight where a small instance is solved for throughput."""
    return 1 + seed % 6


def random_instance(seed: int, nodes: int | None = None, layers: int | None = None, **changes: object) -> Instance:
    """Boxes 2-8, layers 4-24, memory 1.1x / 1.5x / 3x of need by seed, links asymmetric; `changes` replace fields.

    All times are whole microseconds and all sizes whole bytes, so that different solvers can agree.
    """
    rng = np.random.default_rng(seed)
    nodes = nodes if nodes is not None else int(rng.integers(2, 9))
    layers = layers if layers is not None else int(rng.integers(4, 25))
    speed = 10 ** rng.uniform(-3, -2, size=(nodes, 1))
    weight = rng.uniform(0.7, 1.3, size=(1, layers)) if seed % 2 else np.ones((1, layers))
    layer_bytes = np.round(weight[0] * 100)
    fixed = {"embed_bytes": 40.0, "head_bytes": 50.0, "tied_bytes": 40.0 if seed % 3 == 0 else 0.0, "stage_bytes": 10.0}
    need = layer_bytes.sum() + fixed["embed_bytes"] + fixed["head_bytes"] + fixed["stage_bytes"] * nodes
    share = rng.dirichlet(np.full(nodes, 2.0))
    capacity = np.round(share * need * TIGHTNESS[seed % 3 if seed % 5 else (seed // 5) % 3])
    capacity[0] = max(capacity[0], layer_bytes[0] + 150)
    spread = rng.uniform(0.95, 1.05, size=(nodes, layers) if seed % 2 else (nodes, 1))
    hop = 10 ** rng.uniform(-3.3, -1.7, size=(nodes, nodes))
    fields: dict[str, object] = {
        "compute_s": _microseconds(speed * weight * spread),
        "embed_s": _microseconds(rng.uniform(0, 1e-3, nodes)),
        "head_s": _microseconds(rng.uniform(0, 5e-3, nodes)),
        "overhead_s": _microseconds(rng.uniform(0, 1e-3, nodes)),
        "hop_s": _microseconds(hop),
        "return_s": _microseconds(hop / 50),
        "latency_s": _microseconds(rng.uniform(0, 3e-3, (nodes, nodes))),
        "layer_bytes": layer_bytes,
        "capacity_bytes": capacity,
        "max_layers": np.full(nodes, layers, dtype=np.int64),
        "relays": seed % 4 == 1,
        "asynchronous": seed % 7 < 5,
        "head_on_source": seed % 6 == 4,
        **fixed,
        **changes,
    }
    return Instance(**fields)  # type: ignore[arg-type]


def _microseconds(values: Floats) -> Floats:
    return np.round(values * 1e6) / 1e6


def _instance(rng: np.random.Generator, speed_s: Floats, rooms: Floats, hop_s: Floats, latency_s: Floats) -> Instance:
    """Equal blocks of one memory unit each; boxes differ in seconds per block, in room and in all their links."""
    nodes = len(speed_s)
    return Instance(
        compute_s=np.repeat(speed_s[:, None], LAYERS, axis=1),
        embed_s=np.full(nodes, 1e-4),
        head_s=speed_s * 0.7,
        overhead_s=np.full(nodes, 2e-4),
        hop_s=hop_s,
        return_s=hop_s / 100,
        latency_s=latency_s,
        layer_bytes=np.ones(LAYERS),
        embed_bytes=0.2,
        head_bytes=0.2,
        tied_bytes=0.0,
        stage_bytes=0.05,
        capacity_bytes=rooms,
        max_layers=np.full(nodes, LAYERS, dtype=np.int64),
    )


def arbitrary(seed: int, nodes: int = 100, memory: float = 1.5) -> Instance:
    """Asymmetric links between any two boxes; in all, memory for `memory` times the layers; speeds over a decade."""
    rng = np.random.default_rng(seed)
    speed_s = 10 ** rng.uniform(-3, -2, nodes)
    rooms = rng.dirichlet(np.full(nodes, 3.0)) * LAYERS * memory
    rooms[0] = max(rooms[0], 1.5)
    # Whole layers count: scale until the boxes hold `memory` times the layers, not `memory` times the bytes.
    rooms *= LAYERS * memory / np.floor(rooms).sum()
    hop_s = 10 ** rng.uniform(-3.3, -1.3, (nodes, nodes))
    latency_s = rng.uniform(1e-4, 2e-3, (nodes, nodes))
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
