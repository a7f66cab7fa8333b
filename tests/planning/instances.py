"""Random placement problems for the tests: all times whole microseconds, so that different solvers can agree."""

from __future__ import annotations

import numpy as np

from edgeshard.planning.instance import Instance

TIGHTNESS = (1.1, 1.5, 3.0)


def microseconds(values: np.ndarray) -> np.ndarray:
    return np.round(values * 1e6) / 1e6


def random_instance(seed: int, boxes: int | None = None, layers: int | None = None, **changes: object) -> Instance:
    """Boxes 2-8, layers 4-24, memory 1.1x / 1.5x / 3x of need by seed, links asymmetric; `changes` replace fields."""
    rng = np.random.default_rng(seed)
    boxes = boxes if boxes is not None else int(rng.integers(2, 9))
    layers = layers if layers is not None else int(rng.integers(4, 25))
    speed = 10 ** rng.uniform(-3, -2, size=(boxes, 1))
    weight = rng.uniform(0.7, 1.3, size=(1, layers)) if seed % 2 else np.ones((1, layers))
    layer_bytes = np.round(weight[0] * 100)
    fixed = {"embed_bytes": 40.0, "head_bytes": 50.0, "tied_bytes": 40.0 if seed % 3 == 0 else 0.0, "stage_bytes": 10.0}
    need = layer_bytes.sum() + fixed["embed_bytes"] + fixed["head_bytes"] + fixed["stage_bytes"] * boxes
    share = rng.dirichlet(np.full(boxes, 2.0))
    capacity = np.round(share * need * TIGHTNESS[seed % 3 if seed % 5 else (seed // 5) % 3])
    capacity[0] = max(capacity[0], layer_bytes[0] + 150)
    spread = rng.uniform(0.95, 1.05, size=(boxes, layers) if seed % 2 else (boxes, 1))
    hop = 10 ** rng.uniform(-3.3, -1.7, size=(boxes, boxes))
    fields: dict[str, object] = {
        "compute_s": microseconds(speed * weight * spread),
        "embed_s": microseconds(rng.uniform(0, 1e-3, boxes)),
        "head_s": microseconds(rng.uniform(0, 5e-3, boxes)),
        "overhead_s": microseconds(rng.uniform(0, 1e-3, boxes)),
        "hop_s": microseconds(hop),
        "return_s": microseconds(hop / 50),
        "latency_s": microseconds(rng.uniform(0, 3e-3, (boxes, boxes))),
        "layer_bytes": layer_bytes,
        "capacity_bytes": capacity,
        "max_layers": np.full(boxes, layers, dtype=np.int64),
        "relays": seed % 4 == 1,
        "asynchronous": seed % 7 < 5,
        "head_on_source": seed % 6 == 4,
        **fixed,
        **changes,
    }
    return Instance(**fields)  # type: ignore[arg-type]
