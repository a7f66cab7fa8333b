"""Costs of cuts, and whether they may be used at all. Pure; every solver's answer is scored here,
never by the solver.

R, the round, is the time a micro-batch needs once around the ring: stages, hops, delays and the
return to the source. B, the bottleneck, is the time of the busiest *station*, what serves one
micro-batch at a time: a node's compute, a link. A link's pure delay is part of R only.
(docs/papers.md#the-placement-problem)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeshard.planning.solvers.instance import Cut, Instance, Score

# Relative slack when a sum of floats meets a limit: two orders of adding the same numbers must not
# decide feasibility.
SLACK = 1e-9


def within(value: float, limit: float) -> bool:
    """Whether `value` keeps `limit`, except for rounding."""
    return value <= limit * (1 + SLACK)


def stages(cut: Cut) -> tuple[tuple[int, int, int], ...]:
    """(node, first layer, end) per stage, in the order of the ring."""
    starts = (0, *cut.ends[:-1])
    return tuple(zip(cut.nodes, starts, cut.ends, strict=True))


def score(instance: Instance, cut: Cut, names: Sequence[str] | None = None) -> Score:
    """R, B and the bottleneck in words. `names` are the nodes' names, else "node 3".

    It does not check whether the cut is allowed: `violations` does. A missing link makes R and B
    infinite.
    """
    title = names if names is not None else [f"node {node}" for node in range(instance.nodes)]
    source, count = instance.source, len(cut.nodes)
    stage_s = [_stage_seconds(instance, cut, index) for index in range(count)]
    hops = _hops(instance, cut)
    hop_s = [seconds for _, _, seconds, _ in hops]
    stations: list[tuple[float, str]] = []
    for index, node in enumerate(cut.nodes):
        head = instance.head_on_source and node == source
        what = "first stage and head" if head and count > 1 else "compute"
        if instance.asynchronous or not hops:
            stations.append((stage_s[index], f"{what} of {title[node]}"))
        else:
            stations.append((stage_s[index] + hop_s[index], f"{what} and sending of {title[node]}"))
    if instance.asynchronous:
        for index, (sender, receiver, seconds, _) in enumerate(hops):
            what = "return" if index == count - 1 else "link"
            stations.append((seconds, f"{what} {title[sender]} -> {title[receiver]}"))
    busiest, words = max(stations, key=lambda station: station[0])
    round_s = sum(stage_s) + sum(hop_s) + sum(delay for *_, delay in hops)
    return Score(float(round_s), float(busiest), words, tuple(stage_s), tuple(hop_s))


def _stage_seconds(instance: Instance, cut: Cut, index: int) -> float:
    node, start, end = stages(cut)[index]
    if instance.stage_s is not None:
        return float(instance.stage_s[node, start, end])
    seconds = instance.overhead_s[node] + instance.compute_s[node, start:end].sum()
    if index == 0:
        seconds += instance.embed_s[node]
    if _carries_head(instance, cut, index):
        seconds += instance.head_s[node]
    return float(seconds)


def _carries_head(instance: Instance, cut: Cut, index: int) -> bool:
    return index == (0 if instance.head_on_source else len(cut.nodes) - 1)


def _hops(instance: Instance, cut: Cut) -> list[tuple[int, int, float, float]]:
    """(sender, receiver, seconds on the link, pure delay) of every hop, the return last; empty for
    a single node."""
    if len(cut.nodes) == 1:
        return []
    hops = [
        (
            sender,
            receiver,
            float(instance.hop_s[sender, receiver]),
            float(instance.latency_s[sender, receiver]),
        )
        for sender, receiver in zip(cut.nodes[:-1], cut.nodes[1:], strict=True)
    ]
    last, source = cut.nodes[-1], cut.nodes[0]
    hops.append(
        (
            last,
            source,
            float(instance.return_s[last, source]),
            float(instance.latency_s[last, source]),
        )
    )
    return hops


def stage_bytes(instance: Instance, cut: Cut) -> tuple[float, ...]:
    """The memory each stage takes on its node."""
    needs = []
    for index, (_, start, end) in enumerate(stages(cut)):
        first, head = index == 0, _carries_head(instance, cut, index)
        need = instance.stage_bytes + float(instance.layer_bytes[start:end].sum())
        need += (
            instance.embed_bytes * first
            + instance.head_bytes * head
            - instance.tied_bytes * (first and head)
        )
        needs.append(need)
    return tuple(needs)


def violations(instance: Instance, cut: Cut) -> tuple[str, ...]:
    """Every rule the cut breaks, in words; empty when it may be used."""
    faults = _shape_violations(instance, cut)
    if faults:
        return tuple(faults)
    if len(set(cut.nodes)) != len(cut.nodes):
        twice = sorted({node for node in cut.nodes if cut.nodes.count(node) > 1})
        faults.append(f"a node is more than one stage: {twice}")
    if cut.nodes[0] != instance.source:
        faults.append(f"the first stage is node {cut.nodes[0]}, not the source {instance.source}")
    if not instance.min_nodes <= len(cut.nodes) <= instance.max_nodes:
        faults.append(f"{len(cut.nodes)} stages, not {instance.min_nodes} to {instance.max_nodes}")
    for (node, start, end), need in zip(stages(cut), stage_bytes(instance, cut), strict=True):
        if end <= start:
            faults.append(f"node {node} has no layers")
        if end - start > instance.max_layers[node]:
            faults.append(
                f"node {node} has {end - start} layers, more than its {instance.max_layers[node]}"
            )
        if instance.stage_s is not None:
            if not np.isfinite(instance.stage_s[node, start, end]):
                faults.append(
                    f"node {node} cannot hold {end - start} layers, not even streaming them"
                )
        elif not within(need, float(instance.capacity_bytes[node])):
            faults.append(
                f"node {node} needs {need:.0f} bytes of its {instance.capacity_bytes[node]:.0f}"
            )
    if not np.isfinite(score(instance, cut).round_s):
        faults.append("two neighbours have no link")
    return tuple(faults)


def _shape_violations(instance: Instance, cut: Cut) -> list[str]:
    """Reasons why it is no cut of this instance at all; the other rules cannot be checked
    otherwise."""
    if not cut.nodes or len(cut.nodes) != len(cut.ends):
        return [f"{len(cut.nodes)} nodes for {len(cut.ends)} ends"]
    unknown = [node for node in cut.nodes if not 0 <= node < instance.nodes]
    if unknown:
        return [f"no such node: {unknown}"]
    if cut.ends[-1] != instance.layers:
        return [f"the last stage ends at layer {cut.ends[-1]}, not {instance.layers}"]
    if any(end < start for start, end in zip((0, *cut.ends[:-1]), cut.ends, strict=True)):
        return ["the stages' ends do not rise"]
    return []
