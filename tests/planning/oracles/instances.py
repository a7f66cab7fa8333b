"""Problems made from a seed: placements as the solvers see them, small ones of every sort and the
large ones of the bench; and whole planning problems, sites with workloads."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from types import MappingProxyType
from typing import Any

import numpy as np

from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.planning.inputs.devices import Cluster, Link, parse_cluster, with_nodes
from edgeshard.planning.inputs.problem import Objective, PlanProblem, Rate
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS, ModelSpec, model_from_config
from edgeshard.planning.inputs.workspace import workspace_bytes
from edgeshard.planning.solvers.instance import Floats, Instance

LAYERS = 80
RANDOM_SEEDS = range(200)
"""The small instances that the tests and `make bench` compare solvers on."""
TIGHTNESS = (1.1, 1.5, 3.0)
"""Memory over need."""


def random_micro_batches(seed: int) -> int:
    """The number of micro-batches in flight for a small instance that is solved for throughput."""
    return 1 + seed % 6


def random_instance(
    seed: int, nodes: int | None = None, layers: int | None = None, **changes: object
) -> Instance:
    """Nodes 2-8, layers 4-24, memory 1.1x / 1.5x / 3x of need by seed, links asymmetric; `changes`
    replace fields.

    All times are whole microseconds and all sizes whole bytes, so that different solvers can agree.
    """
    rng = np.random.default_rng(seed)
    nodes = nodes if nodes is not None else int(rng.integers(2, 9))
    layers = layers if layers is not None else int(rng.integers(4, 25))
    speed = 10 ** rng.uniform(-3, -2, size=(nodes, 1))
    weight = rng.uniform(0.7, 1.3, size=(1, layers)) if seed % 2 else np.ones((1, layers))
    layer_bytes = np.round(weight[0] * 100)
    fixed = {
        "embed_bytes": 40.0,
        "head_bytes": 50.0,
        "tied_bytes": 40.0 if seed % 3 == 0 else 0.0,
        "stage_bytes": 10.0,
    }
    need = (
        layer_bytes.sum()
        + fixed["embed_bytes"]
        + fixed["head_bytes"]
        + fixed["stage_bytes"] * nodes
    )
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
        "asynchronous": seed % 7 < 5,
        "head_on_source": seed % 6 == 4,
        **fixed,
        **changes,
    }
    return Instance(**fields)  # type: ignore[arg-type]


def _microseconds(values: Floats) -> Floats:
    return np.round(values * 1e6) / 1e6


def _instance(
    rng: np.random.Generator, speed_s: Floats, rooms: Floats, hop_s: Floats, latency_s: Floats
) -> Instance:
    """Equal blocks of one memory unit each; nodes differ in seconds per block, in room and in all
    their links."""
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
    """Links differ between any two nodes and directions. The nodes together have memory for
    `memory` times the layers, and their speeds span a decade.
    """
    rng = np.random.default_rng(seed)
    speed_s = 10 ** rng.uniform(-3, -2, nodes)
    rooms = rng.dirichlet(np.full(nodes, 3.0)) * LAYERS * memory
    rooms[0] = max(rooms[0], 1.5)
    # Whole layers count: scale until the nodes hold `memory` times the layers, not `memory` times
    # the bytes.
    rooms *= LAYERS * memory / np.floor(rooms).sum()
    hop_s = 10 ** rng.uniform(-3.3, -1.3, (nodes, nodes))
    latency_s = rng.uniform(1e-4, 2e-3, (nodes, nodes))
    return _instance(rng, speed_s, rooms, hop_s, latency_s)


def classed(seed: int, sizes: tuple[int, ...], room: float = 4.0) -> Instance:
    """Classes of `sizes` nodes, the quicker the fewer, with room for about `room` layers a node;
    node 0 is the source."""
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(len(sizes)), sizes)
    by_size = np.argsort(np.argsort(-np.array(sizes), kind="stable"), kind="stable")
    speed_s = np.sort(10 ** rng.uniform(-3, -2, len(sizes)))[::-1][by_size]
    rooms = np.maximum(1.3, rng.uniform(0.5, 1.5, len(sizes)) * room)
    hop_s = 10 ** rng.uniform(-3.3, -1.7, (len(sizes), len(sizes)))
    latency_s = rng.uniform(1e-4, 2e-3, (len(sizes), len(sizes)))
    spread = np.ix_(classes, classes)
    return _instance(rng, speed_s[classes], rooms[classes], hop_s[spread], latency_s[spread])


def random_problem(
    seed: int,
    objective: Objective = Objective.THROUGHPUT,
    large: bool = False,
    hybrid: bool = False,
) -> PlanProblem:
    """A site and a workload. Usually 2 to 5 nodes and 2 to 10 layers, memory from short to ample.
    If `large`, 6 to 15 nodes and 12 to 40 layers, memory for 1.3 to 2.5 times the need. Prompts of
    1 to 3,000 tokens, answers of 1 to 512, any links (some missing) and any of the planner's
    limits. A `hybrid` has layers of two kinds in any order."""
    rng = np.random.default_rng([seed, large])
    nodes, layers = (
        (rng.integers(6, 16), rng.integers(12, 41))
        if large
        else (rng.integers(2, 6), rng.integers(2, 11))
    )
    config = BUILT_IN_CONFIGS["llama2-7b"] | {
        "num_hidden_layers": int(layers),
        "hidden_size": int(rng.choice([512, 2048, 4096])),
        "num_key_value_heads": int(rng.choice([4, 32])),
        "vocab_size": int(rng.choice([2000, 32000])),
        "tie_word_embeddings": bool(rng.random() < 0.3),
    }
    model = model_from_config("small", _hybrid(seed, config) if hybrid else config)
    dtype = DType.FLOAT16 if rng.random() < 0.5 else DType.FLOAT32
    prompt_tokens = round(10 ** rng.uniform(0, np.log10(3000)))
    cluster = _random_cluster(rng, model, dtype, prompt_tokens, int(nodes), large)
    new_tokens = round(10 ** rng.uniform(0, np.log10(512)))
    # Not used; without this draw all that follow would make other problems of the same seeds.
    rng.random()
    problem = PlanProblem(
        model=model,
        cluster=cluster,
        objective=objective,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        dtype=dtype,
        asynchronous=bool(rng.random() < 0.8),
        head_on_source=bool(rng.random() < 0.2),
        sliced=bool(rng.random() < 0.8),
    )
    return replace(problem, **_random_limits(rng, problem))


def _hybrid(seed: int, config: dict[str, Any]) -> dict[str, Any]:
    """A model of these sizes, some of whose layers keep a state instead of keys and values."""
    rng = np.random.default_rng([seed, 5])
    kinds, heads = ("linear_attention", "full_attention"), int(rng.choice([4, 16, 32]))
    return config | {
        "model_type": "qwen3_5_text",
        "layer_types": [kinds[int(rng.random() < 0.4)] for _ in range(config["num_hidden_layers"])],
        "head_dim": 128,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
    }


def _random_cluster(
    rng: np.random.Generator,
    model: ModelSpec,
    dtype: DType,
    prompt_tokens: int,
    nodes: int,
    large: bool,
) -> Cluster:
    whole = float(model.parameter_count * dtype.itemsize)
    step = workspace_bytes(model, dtype, prompt_tokens, 1)
    shares = rng.dirichlet(np.full(nodes, 4.0)) * rng.uniform(1.3, 2.5)
    if not large:
        shares = rng.choice([0.4, 0.8, 1.5, 4.0], nodes) * rng.uniform(0.7, 1.3, nodes)
    devices: list[dict[str, Any]] = []
    for index in range(nodes):
        device: dict[str, Any] = {
            "memory_bytes": whole * shares[index]
            + step * float(rng.choice([1.1, 2.0] if large else [1.1, 2.0, 8.0])),
            "system_bytes": 0.0,
            "bandwidth_bytes_per_s": 10 ** rng.uniform(10, 12),
            "flops": 10 ** rng.uniform(11.5, 14),
            "unified": bool(rng.random() < 0.5),
            "step_overhead_s": float(rng.choice([0.0, 1e-3, 5e-3])),
        }
        if rng.random() < 0.2:
            device["up_bps"] = 10 ** rng.uniform(6.5, 9)
        if rng.random() < 0.1:
            device["down_bps"] = 10 ** rng.uniform(6.5, 9)
        if index and rng.random() < 0.25:
            device = devices[-1]  # one more of its kind
        devices.append(device)
    named = [{**device, "name": f"node-{index}"} for index, device in enumerate(devices)]
    default = {"bandwidth_bps": 10 ** rng.uniform(6.5, 9.5), "latency_s": 10 ** rng.uniform(-4, -2)}
    cluster = parse_cluster({"source": "node-0", "device": named, "link": default})
    links = {}
    if rng.random() < 0.7:
        for ends in permutations(cluster.names, 2):
            if rng.random() < 0.3:
                missing = rng.random() < 0.2
                links[ends] = Link(
                    0.0 if missing else 10 ** rng.uniform(6, 9.5), 10 ** rng.uniform(-4, -1.5)
                )
    return replace(cluster, links=MappingProxyType(links))


def _random_limits(rng: np.random.Generator, problem: PlanProblem) -> dict[str, Any]:
    names, found = problem.cluster.names, dict[str, Any]()
    if rng.random() < 0.7:
        found["concurrency"] = int(rng.integers(2, 33))
    if rng.random() < 0.4:
        found["batch"] = int(rng.integers(1, 13))
    if rng.random() < 0.2:
        found["max_time_per_token_s"] = 10 ** rng.uniform(-2.5, 0.5)
    if rng.random() < 0.2:
        found["max_share"] = {str(rng.choice(names)): float(rng.uniform(0.1, 1.0))}
    if rng.random() < 0.15:
        found["min_nodes"] = int(rng.integers(1, 4))
    if rng.random() < 0.2:
        found["max_nodes"] = int(rng.integers(found.get("min_nodes", 1), len(names) + 2))
    if rng.random() < 0.15:
        found["reserve"] = {str(rng.choice(names)): 10 ** rng.uniform(7, 9.5)}
    if rng.random() < 0.15:
        found["context_tokens"] = (
            problem.prompt_tokens + problem.new_tokens + int(rng.integers(0, 500))
        )
    if rng.random() < 0.15:
        found["step_tokens"] = int(rng.choice([512, 2048]))
    if rng.random() < 0.15:
        found["loading_itemsize"] = problem.dtype.itemsize
    if rng.random() < 0.15:
        found["quantisation"] = Quantisation.INT8
    return found


def served_site(seed: int, nodes: int = 4, layers: int = 12) -> PlanProblem:
    """A site under load, planned for its steady rate. It has 2 to `nodes` nodes, which can seldom
    hold the model by themselves, and 6 to `layers` layers. Prompts have 128 to 4,000 tokens,
    answers 16 to 512, and up to 32 requests run at once."""
    rng = np.random.default_rng([seed, 31])
    config = BUILT_IN_CONFIGS["llama2-7b"] | {
        "num_hidden_layers": int(rng.integers(6, layers + 1)),
        "hidden_size": int(rng.choice([1024, 2048, 4096])),
        "num_key_value_heads": int(rng.choice([8, 32])),
    }
    model = model_from_config("served", config)
    whole, room = float(model.parameter_count * DType.FLOAT16.itemsize), rng.uniform(0.4, 0.9)
    devices = [
        {
            "name": f"node-{index}",
            "memory_bytes": whole * room * rng.uniform(0.7, 1.3) + 4e9,
            "system_bytes": 0.0,
            "bandwidth_bytes_per_s": 10 ** rng.uniform(10.3, 11.7),
            "flops": 10 ** rng.uniform(12, 13.8),
            "step_overhead_s": float(rng.choice([0.0, 1e-3, 3e-3])),
        }
        for index in range(int(rng.integers(2, nodes + 1)))
    ]
    link = {"bandwidth_bps": 10 ** rng.uniform(7, 9.5), "latency_s": 10 ** rng.uniform(-4, -2)}
    new_tokens = round(2 ** rng.uniform(4, 9))
    return PlanProblem(
        model=model,
        cluster=parse_cluster({"source": "node-0", "device": devices, "link": link}),
        objective=Objective.THROUGHPUT,
        rate=Rate.STEADY,
        prompt_tokens=min(round(2 ** rng.uniform(7, 12)), 4096 - new_tokens),
        new_tokens=new_tokens,
        dtype=DType.FLOAT16,
        concurrency=int(rng.choice([4, 8, 16, 32])),
    )


def grown(problem: PlanProblem) -> dict[str, PlanProblem]:
    """The same problem with more of one thing."""
    cluster, limit = problem.cluster, problem.request_limit
    roomier = tuple(
        replace(node, device=replace(node.device, memory_bytes=1.3 * node.device.memory_bytes))
        for node in cluster.nodes
    )
    quicker = {
        ends: replace(link, bandwidth_bps=1.5 * link.bandwidth_bps)
        for ends, link in cluster.links.items()
    }
    default = replace(cluster.default_link, bandwidth_bps=1.5 * cluster.default_link.bandwidth_bps)
    found = {
        "memory": replace(problem, cluster=replace(cluster, nodes=roomier)),
        "node": replace(problem, cluster=with_nodes(cluster, cluster.nodes[1].group, 1, "grown")),
        "links": replace(
            problem, cluster=replace(cluster, links=MappingProxyType(quicker), default_link=default)
        ),
    }
    if problem.goal is Objective.THROUGHPUT:
        found["batch"] = replace(problem, batch=problem.batch_limit + 3)
        if limit is not None:
            found["concurrency"] = replace(problem, concurrency=limit + 5)
    return found
