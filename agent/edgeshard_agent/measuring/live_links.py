"""The links of this node as its traffic shows them, reported to the coordinator when they differ
from the probes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from edgeshard.domain.clock import Clock
from edgeshard.domain.control.commands import ProfileReport
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId
from edgeshard.domain.nodes.profile import LinkProfile, LinkSample, MeasuredLink
from edgeshard.profiles.links import LiveLink

log = structlog.get_logger()


class LiveLinks:
    """Links that this process has probed. For other links the latency is unknown, and traffic does
    not show it."""

    def __init__(
        self, node_id: NodeId, report: Callable[[ProfileReport], Awaitable[None]], clock: Clock
    ) -> None:
        self._node_id = node_id
        self._report = report
        self._clock = clock
        self._links: dict[NodeId, LiveLink] = {}
        self._reporting: set[asyncio.Task[None]] = set()

    def probed(self, links: tuple[MeasuredLink, ...]) -> None:
        """These links were measured and reported just now."""
        for link in links:
            self._links[link.receiver] = LiveLink(link.profile, self._clock.now())

    def heard(self, receiver: NodeId, sample: LinkSample) -> None:
        """A step in several parts has arrived at the receiver."""
        link = self._links.get(receiver)
        profile = None if link is None else link.heard(sample, self._clock.now())
        if profile is not None:
            task = asyncio.create_task(self._tell(receiver, profile), name="live-link")
            self._reporting.add(task)
            task.add_done_callback(self._reporting.discard)

    async def close(self) -> None:
        for task in self._reporting:
            task.cancel()
        await asyncio.gather(*self._reporting, return_exceptions=True)

    async def _tell(self, receiver: NodeId, profile: LinkProfile) -> None:
        log.info("link_changed", to=receiver, bandwidth_bps=round(profile.bandwidth_bps))
        try:
            await self._report(
                ProfileReport(
                    self._node_id, links=(MeasuredLink(self._node_id, receiver, profile),)
                )
            )
        except EdgeShardError as error:  # a later change, or a probe, reports it
            log.warning("link_not_reported", to=receiver, reason=error.reason, why=error.message)
