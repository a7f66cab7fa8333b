"""Rules for the nodes of a random problem, made from a seed, as an operator would write them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgeshard.domain.deployments.rules import RuledNode, parse_rule, resolve
from edgeshard.planning.inputs.problem import PlanProblem

ZONES = ("hall1", "hall2", "hall3")


def with_rules(problem: PlanProblem, seed: int, most: int = 3) -> PlanProblem:
    """The problem under 1 to `most` rules of every kind, which need not go together."""
    rng = np.random.default_rng([seed, 7])
    names, source = problem.cluster.names, problem.cluster.source
    zones = ZONES[: 2 + len(names) // 6]
    labels = {
        name: {
            "zone": zones[0] if name == source else str(rng.choice(zones)),
            "cost_per_hour": f"{rng.uniform(0.1, 2):.2f}",
            "rack": f"r{rng.integers(0, len(names))}",
        }
        for name in names
    }
    nodes = [RuledNode(name, labels[name], float(rng.uniform(10, 60))) for name in names]
    texts = [
        _text(rng, [name for name in names if name != source], nodes)
        for _ in range(rng.integers(1, most + 1))
    ]
    return replace(problem, rules=resolve([parse_rule(text) for text in texts], nodes))


def _text(rng: np.random.Generator, others: list[str], nodes: list[RuledNode]) -> str:
    pair = list(rng.choice(others, min(2, len(others)), replace=False))
    zone = str(rng.choice([node.labels["zone"] for node in nodes]))
    own = nodes[0].labels
    watts = sum(node.busy_w or 0.0 for node in nodes)
    cost = sum(float(node.labels["cost_per_hour"]) for node in nodes)
    texts = [
        f"use {pair[0]}",
        f"avoid {pair[-1]}",
        f"use zone={zone}",
        "together by zone",
        "apart by rack",
        f"at-most {rng.integers(1, 3)} of zone={zone}",
        f"max-watts {rng.uniform(0.2, 1.0) * watts:.1f}",
        f"max-cost-per-hour {max(float(own['cost_per_hour']), rng.uniform(0.2, 1.0) * cost):.2f}",
    ]
    if len(pair) > 1:
        texts += [f"together {','.join(pair)}", f"apart {','.join(pair)}"]
    return str(rng.choice(texts))
