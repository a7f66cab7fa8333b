"""Nodes that are measured before something is placed on them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.profiling.first_profiles import first_jobs, still_measuring, usable
from edgeshard_coordinator.core.values.events import MeasureRequested
from edgeshard_coordinator.core.values.state import State

log = structlog.get_logger()


def lacks_measurements(state: State, spec: DeploymentSpec, config: Mapping[str, Any], active_requests: int) -> bool:
    """Whether `measure_first` has anything to request, or to wait for."""
    return bool(still_measuring(state, usable(state, spec)) or first_jobs(state, spec, config, active_requests))


async def measure_first(
    loop: StateLoop, spec: DeploymentSpec, config: Mapping[str, Any], limit_s: float, active_requests: int
) -> None:
    """Have nodes that a deployment may use measure the missing figures of a plan. Returns when that
    is over, or after `limit_s`. While requests are active, nodes that serve are left out.

    Measurements that already run are waited for. If they were for something else, their nodes are
    called afterwards. Nodes continue after `limit_s`, and one that gets a stage ends its
    measurement. A measurement that fails is only the node's failure: its log has the reason, it is
    not repeated, and the placement continues without it.
    """
    usable_nodes = usable(loop.state, spec)
    queried_nodes: set[NodeId] = set()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                at_it = still_measuring(loop.state, usable_nodes)
                for compute, node_ids in first_jobs(loop.state, spec, config, active_requests):
                    new = tuple(node_id for node_id in node_ids if node_id not in queried_nodes)
                    queried_nodes.update(new)
                    if new:
                        with suppress(EdgeShardError):  # a node went away meanwhile
                            await loop.ask(MeasureRequested(uuid.uuid4().hex, new, compute, False, loop.now()))
                await loop.until(lambda state: not still_measuring(state, usable_nodes))
                if at_it <= queried_nodes:
                    return
    except TimeoutError:
        late = sorted(loop.state.nodes[node_id].name for node_id in still_measuring(loop.state, usable_nodes))
        log.info("placed_without_measurements", deployment=spec.name, nodes=late)
