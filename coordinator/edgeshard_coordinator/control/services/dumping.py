"""Dumps of the coordinator and of all connected nodes, for the search for a fault.

As with traces, nothing in the state depends on them: commands go straight to the control streams,
and the wait for their answers ends with the call.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from edgeshard.debugging.dump import ProcessDump, to_text
from edgeshard.domain.control.commands import CommandResult, DumpPart, TakeDump
from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, NodeName, OperationId
from edgeshard_coordinator.control.runtime.hub import ControlHub, NodeRequests
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.core.machine.apply import machine
from edgeshard_coordinator.core.values.state import KnownNode

ANSWER_LIMIT_S = 10.0
AT_ONCE = 4
"""Nodes queried at a time: their dumps are in memory until the caller has them."""
MOST_BYTES = 32 << 20
"""Bytes of one node's dump."""
_BYTES_OF_A_PART = 64
"""Bytes that a part without content counts as, so that a node cannot send parts without end."""

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Asked:
    node_id: NodeId
    answer: asyncio.Future[bytes]
    parts: list[bytes] = field(default_factory=list)
    size_bytes: int = 0


class Dumps:
    """Dumps of all processes: `take` them; `came` and `refused` get the nodes' answers. `about`
    describes this process."""

    def __init__(
        self,
        loop: StateLoop,
        hub: ControlHub,
        about: Callable[[], dict[str, Any]] = dict,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self._loop = loop
        self._node_requests = NodeRequests(loop, hub, answer_limit_s, "dump")
        self._asked: dict[OperationId, _Asked] = {}
        self.about = about

    @property
    def waiting(self) -> int:
        """Answers that callers wait for."""
        return len(self._asked)

    async def take(self) -> AsyncGenerator[ProcessDump, None]:
        """The coordinator's, then one of each known node, by name, with a failure if a node sent
        none."""
        nodes = sorted(self._loop.state.nodes.values(), key=lambda node: (node.name, node.node_id))
        try:
            own = ProcessDump(NodeName(""), await self._own())
        except Exception:
            log.exception("dump_crashed")
            failure = InternalError("the coordinator's own dump crashed; see its log")
            own = ProcessDump(NodeName(""), failure=failure)
        yield own
        for start in range(0, len(nodes), AT_ONCE):
            for dump in await asyncio.gather(
                *(self._of(node) for node in nodes[start : start + AT_ONCE])
            ):
                yield dump

    def came(self, node_id: NodeId, part: DumpPart) -> None:
        """Take a part that a node sent, if a caller waits for it."""
        query = self._asked.get(part.operation_id)
        if query is None or query.node_id != node_id or query.answer.done():
            return
        query.parts.append(part.part)
        query.size_bytes += len(part.part) + _BYTES_OF_A_PART
        if query.size_bytes > MOST_BYTES:
            query.answer.set_exception(
                ResourceExhaustedError(f"its dump is larger than {MOST_BYTES >> 20} MiB")
            )
        elif part.last:
            query.answer.set_result(b"".join(query.parts))

    def refused(self, node_id: NodeId, result: CommandResult) -> bool:
        """Take the answer if it is one to a dump: a node of another version may know none."""
        query = self._asked.get(result.operation_id)
        if query is None or query.node_id != node_id:
            return False
        if not query.answer.done():
            query.answer.set_exception(
                result.failure or UnavailableError("it answered without a dump")
            )
        return True

    async def _own(self) -> bytes:
        about = self.about()
        state = self._loop.state
        ring = self._loop.recorded()
        # The values are frozen, so they can become text outside the event loop.
        return await asyncio.to_thread(lambda: to_text(about | machine().document(state, ring)))

    async def _of(self, node: KnownNode) -> ProcessDump:
        try:
            return ProcessDump(node.name, await self._ask(node))
        except EdgeShardError as error:
            return ProcessDump(node.name, failure=error)

    async def _ask(self, node: KnownNode) -> bytes:
        operation_id = OperationId(f"{uuid.uuid4().hex}/dump")
        query = self._asked[operation_id] = _Asked(
            node.node_id, asyncio.get_running_loop().create_future()
        )
        try:
            return await self._node_requests.answer(node, operation_id, TakeDump(), query.answer)
        finally:
            del self._asked[operation_id]
