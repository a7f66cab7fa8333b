"""What an operator asks of a node's packed files: which there are, and to remove some. Done beside the node's work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from edgeshard.domain.control.commands import CommandResult, DropPacked, ListPacked
from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import OperationId
from edgeshard_agent.store.packed_units import PackedUnits

log = structlog.get_logger()


class PackedRequests:
    """`answer` gets the result of each request. The agent's state depends on none of them."""

    def __init__(self, packed: PackedUnits, answer: Callable[[tuple[CommandResult, ...]], None]) -> None:
        self._packed = packed
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, operation_id: OperationId, command: ListPacked | DropPacked) -> None:
        """Begin, and return at once."""
        task = asyncio.create_task(self._take(operation_id, command), name="packed")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, operation_id: OperationId, command: ListPacked | DropPacked) -> None:
        try:
            if isinstance(command, ListPacked):
                units = await asyncio.to_thread(self._packed.units)
            else:
                units = await asyncio.to_thread(self._packed.drop_units, command.ids)
        except EdgeShardError as error:
            result = CommandResult(operation_id, error)
        except Exception as error:
            log.exception("packed_request_crashed")
            failure = InternalError(
                f"the packed files could not be reached ({type(error).__name__}); see the node's log"
            )
            result = CommandResult(operation_id, failure)
        else:
            result = CommandResult(operation_id, packed=units)
        self._answer((result,))
