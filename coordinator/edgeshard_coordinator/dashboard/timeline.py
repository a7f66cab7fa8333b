"""Short recordings of a deployment's steps, made while browsers watch: one for all viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.rpc.access import CallFrom
from edgeshard_coordinator.control.services.auditing import CallAudit
from edgeshard_coordinator.control.services.tracing import Traces
from edgeshard_coordinator.dashboard.picture import timeline_picture

SLICE_S, EVERY_S = 2.0, 5.0
LOOKS_ON_S = 60.0
"""A browser that asks again within this time still watches: the audit log has one entry of it."""
TAKEN = {"taken": True}
"""The answer while an operator's own trace of the deployment runs."""


@dataclass(eq=False)
class _Slice:
    began_s: float
    recording: asyncio.Task[tuple[StageTrace, ...] | None]
    picture: dict[str, Any] | None = None


class Timeline:
    """`look` returns the newest slice. It records only while a browser waits for it, and displaces
    no operator's trace: a trace that begins later ends this one. `now` returns seconds of a steady
    clock."""

    def __init__(self, traces: Traces, audit: CallAudit, now: Callable[[], float]) -> None:
        self._traces = traces
        self._audit = audit
        self._now = now
        self._slices: dict[DeploymentName, _Slice] = {}
        self._lookers: dict[tuple[str, DeploymentName], float] = {}

    async def look(self, source: CallFrom, name: DeploymentName) -> dict[str, Any]:
        """A slice of at most `EVERY_S` seconds ago, from `timeline_picture`, or TAKEN. Raises as
        `Traces.take` does."""
        now = self._now()
        self._slices = {
            key: time_slice
            for key, time_slice in self._slices.items()
            if now - time_slice.began_s < EVERY_S or not time_slice.recording.done()
        }
        time_slice = self._slices.get(name)
        if time_slice is None:
            recording = asyncio.create_task(self._record(name))
            recording.add_done_callback(_heard)
            time_slice = self._slices[name] = _Slice(now, recording)
        self._note(source, name, now)
        try:
            # The others who wait for it get it even if one leaves.
            traces = await asyncio.shield(time_slice.recording)
        except EdgeShardError as error:
            self._forget(name, time_slice)
            if error.reason == "TRACE_REPLACED":
                return TAKEN
            raise
        if traces is None:
            self._forget(name, time_slice)
            return TAKEN
        time_slice.picture = time_slice.picture or timeline_picture(traces)
        return time_slice.picture

    def _forget(self, name: DeploymentName, time_slice: _Slice) -> None:
        if self._slices.get(name) is time_slice:
            del self._slices[name]

    async def _record(self, name: DeploymentName) -> tuple[StageTrace, ...] | None:
        """The traces; None if a trace runs already. No other call runs between this check and the
        beginning of ours."""
        return None if self._traces.under_way(name) else await self._traces.take(name, SLICE_S)

    def _note(self, source: CallFrom, name: DeploymentName, now: float) -> None:
        """Enter in the audit log that a viewer began to watch."""
        looker = str(source.principal), name
        self._lookers = {key: at for key, at in self._lookers.items() if now - at < LOOKS_ON_S}
        if looker not in self._lookers:
            self._audit.note(source, "Trace", name)
        self._lookers[looker] = now


def _heard(recording: asyncio.Task[tuple[StageTrace, ...] | None]) -> None:
    """Retrieve a failure even if no browser waits for it any more."""
    if not recording.cancelled():
        recording.exception()
