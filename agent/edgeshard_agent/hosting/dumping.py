"""The agent's dumps: what it knows and did lately, as text, made beside its work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from edgeshard.debugging.dump import to_text
from edgeshard.domain.control.commands import CommandResult
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import OperationId
from edgeshard_agent.core.machine import machine
from edgeshard_agent.hosting.host import Hosting

log = structlog.get_logger()


class Dumps:
    """`about` says what this process is; `send` gets a dump as JSON text, `refuse` the reason why there is none."""

    def __init__(
        self,
        hosting: Hosting,
        about: Callable[[], dict[str, Any]],
        send: Callable[[OperationId, bytes], None],
        refuse: Callable[[tuple[CommandResult, ...]], None],
    ) -> None:
        self._hosting = hosting
        self._about = about
        self._send = send
        self._refuse = refuse
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, operation_id: OperationId) -> None:
        """Begin, and return at once."""
        task = asyncio.create_task(self._take(operation_id), name="dump")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, operation_id: OperationId) -> None:
        try:
            about, (state, ring) = self._about(), self._hosting.recorded()
            # The values are frozen: they can become text beside the event loop.
            text = await asyncio.to_thread(lambda: to_text(about | machine().document(state, ring)))
        except Exception:
            log.exception("dump_crashed")
            self._refuse((CommandResult(operation_id, InternalError("the dump crashed; the node's log says why")),))
        else:
            self._send(operation_id, text)
