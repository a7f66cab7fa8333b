"""Every plan there is, scored one by one from the definitions: only for up to about 5 nodes x 10
layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from edgeshard.planning.solvers.instance import Cut, Floats, Instance

TOLERANCE = 1 + 1e-9
Ints = npt.NDArray[np.int64]


@cache
def _cuts(layers: int, stages: int) -> Ints:
    """[cuts, stages + 1] of layers done before each stage and at the end."""
    rows = []
    for ends in itertools.combinations(range(1, layers), stages - 1):
        rows.append((0, *ends, layers))
    return np.array(rows, dtype=np.int64).reshape(-1, stages + 1)


def every_plan(
    instance: Instance, threshold_s: float = float("inf")
) -> Iterator[tuple[tuple[int, ...], Ints, Floats, Floats]]:
    """(nodes, cuts [K, S+1], R [K], B [K]) of all plans that keep memory and have every station <=
    threshold."""
    others = [node for node in range(instance.nodes) if node != instance.source]
    done = np.concatenate(
        [np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1
    )
    held = np.concatenate([[0.0], np.cumsum(instance.layer_bytes)])
    most = min(instance.nodes, instance.max_nodes)
    for count in range(max(1, instance.min_nodes), most + 1):
        cuts = _cuts(instance.layers, count)
        if not len(cuts):
            continue
        for rest in itertools.permutations(others, count - 1):
            nodes = np.array([instance.source, *rest])
            yield (
                tuple(int(node) for node in nodes),
                *_score(instance, nodes, cuts, done, held, threshold_s),
            )


def _score(
    instance: Instance, nodes: Ints, cuts: Ints, done: Floats, held: Floats, threshold_s: float
) -> tuple[Ints, Floats, Floats]:
    """The allowed cuts on these nodes: the cuts, R and B. `done` and `held` are sums over
    layers."""
    count = len(nodes)
    head = 0 if instance.head_on_source else count - 1
    stage = instance.overhead_s[nodes] + done[nodes, cuts[:, 1:]] - done[nodes, cuts[:, :-1]]
    stage[:, 0] += instance.embed_s[nodes[0]]
    stage[:, head] += instance.head_s[nodes[head]]
    need = instance.stage_bytes + held[cuts[:, 1:]] - held[cuts[:, :-1]]
    need[:, 0] += instance.embed_bytes
    need[:, head] += instance.head_bytes
    if head == 0:
        need[:, 0] -= instance.tied_bytes
    ok = (need <= instance.capacity_bytes[nodes] * TOLERANCE).all(axis=1)
    ok &= (np.diff(cuts, axis=1) <= instance.max_layers[nodes]).all(axis=1)
    if count == 1:
        busiest, round_s = stage.max(axis=1), stage.sum(axis=1)
    else:
        receivers = np.roll(nodes, -1)
        hop = instance.hop_s[nodes, receivers].copy()
        hop[-1] = instance.return_s[nodes[-1], nodes[0]]
        round_s = stage.sum(axis=1) + hop.sum() + instance.latency_s[nodes, receivers].sum()
        busiest = (
            np.maximum(stage.max(axis=1), hop.max())
            if instance.asynchronous
            else (stage + hop).max(axis=1)
        )
    ok &= busiest <= threshold_s * TOLERANCE
    return cuts[ok], round_s[ok], busiest[ok]


def best(instance: Instance, micro_batches: int | None = None) -> tuple[float, Cut | None]:
    """The least R, or the least max(R, m B) with `micro_batches`; infinity and None when nothing
    fits."""
    value, cut = float("inf"), None
    for nodes, cuts, round_s, busiest in every_plan(instance):
        values = round_s if micro_batches is None else np.maximum(round_s, micro_batches * busiest)
        if len(values) and values.min() < value:
            value = float(values.min())
            cut = Cut(nodes, tuple(int(end) for end in cuts[int(np.argmin(values)), 1:]))
    return value, cut
