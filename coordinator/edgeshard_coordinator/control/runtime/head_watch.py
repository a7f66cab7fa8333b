"""The watch over heads that have requests: they get beacons, and their answers are watched as on a
link between nodes.

Nothing is sent to a head without requests, and nothing is expected of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NoReturn

import structlog

from edgeshard.domain.ids import DeploymentName
from edgeshard.domain.requests.head import HeadBeacon
from edgeshard.rpc.link_watch import ALIVE, BEACON_S, LinkWatch, next_tick
from edgeshard_coordinator.control.requests.running_request import Attachment
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.values.events import HeadReported

log = structlog.get_logger()


class WatchedHead:
    """The watch of one stream, while its head has requests."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self._watch: LinkWatch | None = None
        self._beacon_at = 0.0

    def tick(self, now: float) -> tuple[str, bool] | None:
        """Send a beacon that is due. If the head is silent: why it is suspect, and whether that is
        new."""
        outgoing, watch = self.attachment.outgoing, self._watch
        if not self.attachment.requests:
            if watch is not None:
                self._watch = None
                outgoing.put_nowait(HeadBeacon())
            return None
        if watch is None:
            watch = self._watch = LinkWatch(now)
            watch.welcomed(0, now)
        if self._beacon_at <= now:
            self._beacon_at = now + BEACON_S
            outgoing.put_nowait(HeadBeacon(follows=True))
        fault = watch.tick(now)
        if fault is None:
            return None
        watch.welcomed(0, now)  # to dial another stream is the head's part
        return fault.why, fault.is_new

    def heard(self, now: float) -> bool:
        """Note an arrival; returns whether the head was suspect until now."""
        return self._watch is not None and self._watch.beacon(ALIVE, now)


class HeadWatch:
    """Tells the state which heads are silent. `suspicions` counts incidents by deployment.

    `occupied` is set while there are requests, so that an idle coordinator need not check.
    """

    def __init__(
        self, loop: StateLoop, occupied: asyncio.Event, suspicions: Counter[DeploymentName]
    ) -> None:
        self._loop = loop
        self._occupied = occupied
        self._suspicions = suspicions
        self._heads: set[WatchedHead] = set()

    def open(self, attachment: Attachment) -> WatchedHead:
        """Watch a head that answers beacons, until `close`."""
        head = WatchedHead(attachment)
        self._heads.add(head)
        return head

    def close(self, head: WatchedHead) -> None:
        self._heads.discard(head)

    def heard(self, head: WatchedHead) -> None:
        if head.heard(self._loop.now()):
            self._tell(head.attachment, "", recovered=True)

    async def run(self) -> NoReturn:
        while True:
            await self._occupied.wait()
            await next_tick()
            for head in tuple(self._heads):
                fault = head.tick(self._loop.now())
                if fault is not None:
                    why, is_new = fault
                    self._suspicions[head.attachment.deployment] += is_new
                    self._tell(head.attachment, why, recovered=False)

    def _tell(self, of: Attachment, why: str, *, recovered: bool) -> None:
        log_method = log.info if recovered else log.warning
        log_method(
            "head_reported",
            deployment=of.deployment,
            node=of.node_name,
            recovered=recovered,
            why=why,
        )
        self._loop.post(HeadReported(of.deployment, of.epoch, recovered, why, self._loop.now()))
