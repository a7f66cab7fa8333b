"""Operator requests outside a node's normal work: dumps of its state and newest events, and its packed files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from edgeshard.debugging.dump import to_text
from edgeshard.domain.control.commands import MAX_LISTED_PACKED, CommandResult, DropPacked, ListPacked
from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import OperationId
from edgeshard_agent.core.machine import machine
from edgeshard_agent.hosting.host import Hosting
from edgeshard_agent.store.packed_units import PackedUnits

log = structlog.get_logger()

Answer = Callable[[tuple[CommandResult, ...]], None]


@dataclass(eq=False)
class _Requests:
    """Requests that are answered by a task each."""

    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(eq=False)
class DumpRequests(_Requests):
    """Takes dumps of the state and the newest events."""

    hosting: Hosting
    about: Callable[[], dict[str, Any]]
    """A description of this process."""
    send: Callable[[OperationId, bytes], None]
    """Gets a dump as JSON text."""
    refuse: Answer
    """Gets the reason why there is none."""

    def take(self, operation_id: OperationId) -> None:
        """Begin, and return at once."""
        self._begin(self._take(operation_id), "dump")

    async def _take(self, operation_id: OperationId) -> None:
        try:
            about, (state, ring) = self.about(), self.hosting.recorded()
            # The values are frozen, so they can be turned into text outside the event loop.
            text = await asyncio.to_thread(lambda: to_text(about | machine().document(state, ring)))
        except Exception:
            log.exception("dump_crashed")
            self.refuse((CommandResult(operation_id, InternalError("the dump crashed; see the node's log")),))
        else:
            self.send(operation_id, text)


@dataclass(eq=False)
class PackedRequests(_Requests):
    """Lists packed files, and removes some. The agent's state depends on neither."""

    packed: PackedUnits
    answer: Answer

    def take(self, operation_id: OperationId, command: ListPacked | DropPacked) -> None:
        """Begin, and return at once."""
        self._begin(self._take(operation_id, command), "packed")

    async def _take(self, operation_id: OperationId, command: ListPacked | DropPacked) -> None:
        try:
            if isinstance(command, ListPacked):
                units = await asyncio.to_thread(self.packed.units)
            else:
                units = await asyncio.to_thread(self.packed.drop_units, command.ids)
        except EdgeShardError as error:
            result = CommandResult(operation_id, error)
        except Exception as error:
            log.exception("packed_request_crashed")
            failure = InternalError(
                f"the packed files could not be reached ({type(error).__name__}); see the node's log"
            )
            result = CommandResult(operation_id, failure)
        else:
            result = CommandResult(operation_id, packed=units[:MAX_LISTED_PACKED])
        self.answer((result,))
