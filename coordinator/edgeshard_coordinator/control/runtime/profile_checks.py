"""The check of the profiles that nodes report, off the event loop: a fit takes processor time."""

from __future__ import annotations

import asyncio

from edgeshard.domain.control.commands import ProfileReport
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeId
from edgeshard_coordinator.control.runtime.solver import Solver
from edgeshard_coordinator.core.values.measurements import check_profile


class ProfileChecks:
    """At most one report of a node is checked or waits, and one report of all is checked at a time."""

    def __init__(self) -> None:
        self._solver = Solver()
        self._turn = asyncio.Lock()
        self._nodes: set[NodeId] = set()

    async def run(self, report: ProfileReport) -> None:
        """Raises InvalidArgumentError for a profile without times of some part of a model, UnavailableError while an
        earlier report of the node is checked."""
        if report.node_id in self._nodes:
            raise UnavailableError(
                "node_id: an earlier profile of this node is still being checked; report again",
                field="node_id",
                reason="PROFILE_UNDER_CHECK",
                retry_after_s=1.0,
            )
        self._nodes.add(report.node_id)
        try:
            async with self._turn:
                await self._solver.run(lambda: _check(report))
        finally:
            self._nodes.discard(report.node_id)


def _check(report: ProfileReport) -> None:
    for profile in report.compute:
        check_profile(profile)
