"""Joules of a batch, from the watts of its nodes, idle and busy. Pure.

    J = sum over the nodes of the cut of  idle_w span + (busy_w - idle_w) computing

The span runs from the batch's start to its last token; a node computes during its prompts and its
tokens. Only nodes of the cut are counted: no link, no switch, and no node of the cluster that the
plan does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeshard.planning.costs.batch_time import BatchTimes, batch_times
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.measured import power_measured
from edgeshard.planning.solvers.instance import Cut, Floats


def energy_j(costs: Costs, cut: Cut, load: Load, times: BatchTimes | None = None) -> float | None:
    """Joules of the load's requests over the cut, from their start to their last token; None if
    watts are unknown.

    Divided by `load.requests` times `new_tokens` it is the energy per token. `times` are the
    batch's if known.
    """
    times = times or batch_times(costs, cut, load)
    total = 0.0
    for node, computing_s in zip(cut.nodes, times.computing_s, strict=True):
        if (power := power_of(costs, node)) is None:
            return None
        total += power.idle_w * times.request_s + (power.busy_w - power.idle_w) * computing_s
    return total


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of a node; `measured` by its own sensor, else of a data sheet or the cluster file."""

    idle_w: float
    busy_w: float
    measured: bool


def power_of(costs: Costs, node: int) -> Power | None:
    """The power of a node; None if it is unknown."""
    device, name = costs.nodes[node].device, costs.names[node]
    if device.idle_w is None or device.busy_w is None:
        return None
    return Power(device.idle_w, device.busy_w, power_measured(costs.problem, name))


def watts(costs: Costs) -> tuple[Floats, Floats]:
    """[M] idle watts, and [M] the watts that computing adds to them; NaN if they are unknown."""
    devices = [node.device for node in costs.nodes]
    idle_w = np.array([np.nan if device.idle_w is None else device.idle_w for device in devices])
    busy_w = np.array([np.nan if device.busy_w is None else device.busy_w for device in devices])
    return idle_w, busy_w - idle_w


def without_power(costs: Costs) -> tuple[str, ...]:
    """The nodes whose watts are unknown."""
    return tuple(
        name for name, idle_w in zip(costs.names, watts(costs)[0], strict=True) if np.isnan(idle_w)
    )
