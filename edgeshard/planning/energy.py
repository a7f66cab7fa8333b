"""What a batch takes in joules, from the watts of its boxes, idle and busy. Pure.

    J = sum over the boxes of the cut of  idle_w span + (busy_w - idle_w) computing

The span runs from the batch's start to its last token; a box computes during its prompts and its tokens. Only boxes of
the cut are counted, relays among them: no link, no switch, and no box of the cluster that the plan does not use.
"""

from __future__ import annotations

from edgeshard.planning.batch_time import BatchTimes, batch_times
from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.instance import Cut


def energy_j(costs: Costs, cut: Cut, load: Load, times: BatchTimes | None = None) -> float | None:
    """Joules of the load's requests over the cut, from their start to their last token; None where watts are unknown.

    Divided by `load.requests` times `new_tokens` it is the energy per token. `times` are the batch's where known.
    """
    times = times or batch_times(costs, cut, load)
    total = 0.0
    for node, computing_s in zip(cut.nodes, times.computing_s, strict=True):
        idle_w, busy_w = costs.nodes[node].device.idle_w, costs.nodes[node].device.busy_w
        if idle_w is None or busy_w is None:
            return None
        total += idle_w * times.request_s + (busy_w - idle_w) * computing_s
    return total
