"""The reason why there is no plan: the constraint that is short, by how much, and the remedy.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.solvers.instance import Instance
from edgeshard.planning.solvers.scoring import SLACK

GB = 1e9
GIB = 1 << 30
_NODE_SIZES_GB = (8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256)
_SYSTEM_BYTES = 3e9
"""Memory that a hypothetical node keeps for its system, as the catalogue's nodes of 16 GB and more
do."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The missing resource.

    `constraint` is memory, source_memory, max_share, max_nodes, min_nodes, max_time_per_token,
    constraints (several together) or rules. `amount` is what is missing in `unit` (bytes, layers,
    nodes, seconds); 0 if there is no such number. `text` describes the shortage and what would
    help.
    """

    constraint: str
    amount: float
    unit: str
    text: str


@dataclass(frozen=True, slots=True)
class _Room:
    """Whole layers each node can hold, and once more with the head; -1 if not even the head
    fits."""

    plain: np.ndarray[tuple[int], np.dtype[np.int64]]
    with_head: np.ndarray[tuple[int], np.dtype[np.int64]]


def shortage_of(costs: Costs, load: Load) -> Shortage:
    """Why no placement carries this load."""
    instance = costs.decode(load)
    room = _room(instance)
    source = costs.names[costs.source]
    first = room.plain[costs.source]
    if first < 1:
        need = instance.stage_bytes + instance.embed_bytes + float(instance.layer_bytes[0])
        need += instance.head_bytes * instance.head_on_source
        short = need - float(instance.capacity_bytes[costs.source])
        lacking = f"source {source} is {gibibytes(short)} short for the embedding and one layer"
        text = f"{lacking}; use a source with more memory"
        return Shortage("source_memory", short, "bytes", text)
    allowed = _limited(room, instance)
    missing = _missing(instance, allowed)
    if missing > 0:
        if _missing(instance, room, len(costs.nodes)) <= 0 < _missing(instance, room):
            return _too_few_nodes(costs, instance, room)
        if _missing(instance, room) <= 0:
            text = (
                f"max_share leaves no node for {_layers(missing)}; allow larger shares or add a "
                "node"
            )
            return Shortage("max_share", float(missing), "layers", text)
        return _memory(costs, load, instance, room)
    usable = int(((room.plain > 0) & (instance.max_layers > 0)).sum())
    most = min(usable, instance.layers)
    if instance.min_nodes > most:
        short = instance.min_nodes - most
        text = (
            f"min_nodes is {instance.min_nodes}, but only {most} nodes can take part; lower it "
            f"or add {short}"
        )
        return Shortage("min_nodes", float(short), "nodes", text)
    text = (
        "the nodes have the memory, but no placement keeps all constraints together "
        f"(nodes {instance.min_nodes} to {instance.max_nodes}, shares, links); relax one of them"
    )
    return Shortage("constraints", 0.0, "", text)


def too_slow(fastest_s: float, limit_s: float) -> Shortage:
    """The placement that answers fastest does not keep max_time_per_token."""
    over = fastest_s - limit_s
    if over <= 0:
        text = (
            f"one request alone gets a token in {1000 * fastest_s:.1f} ms, but with prompts of "
            "others in between no "
            f"plan keeps max_time_per_token {1000 * limit_s:.1f} ms; raise it, or add a faster "
            "node or link"
        )
        return Shortage("max_time_per_token", 0.0, "seconds", text)
    text = (
        f"the fastest plan needs {1000 * fastest_s:.1f} ms per token, {1000 * over:.1f} ms above "
        "max_time_per_token "
        f"{1000 * limit_s:.1f} ms; raise it, or add a faster node or link"
    )
    return Shortage("max_time_per_token", over, "seconds", text)


def rules_conflict(texts: Sequence[str], limit_s: float | None) -> Shortage:
    """Rules that no placement keeps together, though one keeps all limits without them."""
    named = "; ".join(f"'{text}'" for text in texts)
    within = "" if limit_s is None else f" within max_time_per_token {1000 * limit_s:.1f} ms"
    if len(texts) == 1:
        text = f"no placement keeps the rule {named}{within}; loosen it, or add a node"
    else:
        text = (
            f"no placement keeps these rules together{within}: {named}; drop or loosen one of "
            "them, or add a node"
        )
    return Shortage("rules", 0.0, "", text)


def node_room_text(names: Sequence[str], needs: Sequence[float], rooms: Sequence[float]) -> str:
    """Which nodes a fixed placement overfills, for baselines."""
    short = [
        (name, need - room)
        for name, need, room in zip(names, needs, rooms, strict=True)
        if need > room
    ]
    return ", ".join(f"{name} is {gibibytes(amount)} short" for name, amount in short)


def _room(instance: Instance) -> _Room:
    layer = float(instance.layer_bytes.max())
    free = instance.capacity_bytes * (1 + SLACK) - instance.stage_bytes
    free[instance.source] -= instance.embed_bytes
    if instance.head_on_source:
        free[instance.source] -= instance.head_bytes - instance.tied_bytes
    plain = np.maximum(np.floor(free / layer), -1).astype(np.int64)
    head = np.zeros_like(free)
    if not instance.head_on_source:
        head += instance.head_bytes
        head[instance.source] -= instance.tied_bytes
    return _Room(plain, np.maximum(np.floor((free - head) / layer), -1).astype(np.int64))


def _limited(room: _Room, instance: Instance) -> _Room:
    limit = instance.max_layers
    return _Room(np.minimum(room.plain, limit), np.minimum(room.with_head, limit))


def _missing(instance: Instance, room: _Room, most_nodes: int | None = None) -> int:
    """Layers that do not fit on the best choice of nodes, 0 if all fit."""
    layers, source = instance.layers, instance.source
    source_layers = int(room.with_head[source])
    best = min(layers, source_layers) if source_layers >= 1 else 0
    count = (instance.max_nodes if most_nodes is None else most_nodes) - 2
    others = np.array(instance.others, dtype=np.int64)
    if count < 0 or not len(others):
        return max(0, layers - best)
    plain = np.maximum(room.plain[others], 0)
    order = np.argsort(-plain, kind="stable")
    for position, last in enumerate(others):
        if room.with_head[last] < 1:
            continue
        # The largest others in between, not counting the last one.
        positions = order[:count] if position not in order[:count] else order[: count + 1]
        between = int(plain[positions].sum()) - (
            int(plain[position]) if position in positions else 0
        )
        best = max(best, int(room.plain[source]) + between + int(room.with_head[last]))
    return max(0, layers - best)


def _too_few_nodes(costs: Costs, instance: Instance, room: _Room) -> Shortage:
    needed = next(
        n
        for n in range(instance.max_nodes, len(costs.nodes) + 1)
        if _missing(instance, room, n) <= 0
    )
    short = needed - instance.max_nodes
    text = f"max_nodes is {instance.max_nodes}, but the model needs {needed}; allow {short} more"
    return Shortage("max_nodes", float(short), "nodes", text)


def _memory(costs: Costs, load: Load, instance: Instance, room: _Room) -> Shortage:
    missing = _missing(instance, room, len(costs.nodes))
    layer = float(instance.layer_bytes.max())
    # If no node can hold the head, it is missing as well.
    homeless = (
        instance.head_bytes
        if not (room.with_head >= 1).any() and not instance.head_on_source
        else 0.0
    )
    short = missing * layer + homeless
    if (left := _left_in_order(instance)) and layer > instance.layer_bytes.min():
        # If layers differ much, the largest one is a poor measure of how many a node holds. The
        # head follows the last one.
        missing, short = len(left), sum(left) + instance.head_bytes * (not instance.head_on_source)
    hints = [_one_more_node(costs, instance, missing, short, homeless)]
    if costs.problem.dtype is DType.FLOAT32 and _fits_in_half(costs, load):
        hints.append("bfloat16 would fit as it is")
    text = (
        f"{gibibytes(short)} short: {_layers(missing)} of {instance.layers} find no room; "
        f"{', or '.join(hints)}"
    )
    return Shortage("memory", short, "bytes", text)


def _left_in_order(instance: Instance) -> list[float]:
    """Bytes of the layers that are left over if the source and then the largest nodes take as many
    as they hold."""
    source = instance.source
    free = instance.capacity_bytes * (1 + SLACK) - instance.stage_bytes
    free[source] -= instance.embed_bytes
    if instance.head_on_source:
        free[source] -= instance.head_bytes - instance.tied_bytes
    left = [float(size) for size in instance.layer_bytes]
    for room in (free[source], *sorted(free[list(instance.others)], reverse=True)):
        used_bytes = 0.0
        while left and used_bytes + left[0] <= room:
            used_bytes += left.pop(0)
    return left


def _one_more_node(
    costs: Costs, instance: Instance, missing: int, short: float, homeless: float
) -> str:
    layer = float(instance.layer_bytes.max())
    unit = costs.loading_bytes(costs.nodes[costs.source])
    for size in _NODE_SIZES_GB:
        if size * GB - _SYSTEM_BYTES - unit - instance.stage_bytes >= short:
            return f"one more {size} GB node would do"
    size = next(
        (
            s
            for s in (32, *_NODE_SIZES_GB)
            if s * GB > _SYSTEM_BYTES + unit + instance.stage_bytes + layer
        ),
        256,
    )
    node_layers = max(1, int((size * GB - _SYSTEM_BYTES - unit - instance.stage_bytes) // layer))
    count = -(-(missing + (1 if homeless else 0)) // node_layers)
    return f"{count} more {size} GB nodes would do"


def _fits_in_half(costs: Costs, load: Load) -> bool:
    half = Costs(replace(costs.problem, dtype=DType.BFLOAT16, times={})).decode(load)
    room = _limited(_room(half), half)
    return bool(room.plain[half.source] >= 1) and _missing(half, room) <= 0


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def gibibytes(size: float) -> str:
    """`3.1 GiB`, `12.0 MiB`: as everything of edgectl. Only nodes one might buy go by what their
    makers call them."""
    return f"{size / GIB:.1f} GiB" if size >= 0.05 * GIB else f"{size / (1 << 20):.1f} MiB"
