"""A mutating call takes effect once, however often it is sent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from edgeshard.domain.errors import DeadlineError, InvalidArgumentError
from edgeshard.domain.ids import OperationId, check_id
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.values.state import ServedOperation

DISK_LIMIT_S = 5.0
"""Longest wait for a disk that does not respond."""
Work = Callable[[ServedOperation], Awaitable[bytes]]
AnswerT = TypeVar("AnswerT")


class Operations:
    """A repeat gets the first outcome, also after a restart; a call that failed changed nothing and
    may run again."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._running: dict[OperationId, tuple[str, asyncio.Task[bytes]]] = {}

    async def once(self, operation_id: str, request: Message, work: Work) -> bytes:
        """The outcome of `work`, or of the earlier call with this id.

        `work` gets the operation without its outcome, and must save the operation with its outcome.
        It continues when the caller hangs up. Raises InvalidArgumentError naming operation_id if
        the id belongs to another request.
        """
        key = OperationId(check_id(operation_id, "operation_id"))
        fingerprint = fingerprint_of(request)
        if key not in self._running:
            task = asyncio.create_task(self._first(key, fingerprint, work))
            self._running[key] = fingerprint, task
            task.add_done_callback(lambda done: self._forget(key, done))
        running_fingerprint, task = self._running[key]
        check_same(key, running_fingerprint, fingerprint)
        return await asyncio.shield(task)

    async def stop(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _first(self, key: OperationId, fingerprint: str, work: Work) -> bytes:
        served = await answered(self._store.find_operation(key))
        if served is not None:
            check_same(key, served.fingerprint, fingerprint)
            return served.outcome
        return await work(ServedOperation(key, fingerprint, b""))

    def _forget(self, key: OperationId, task: asyncio.Task[bytes]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Read the exception: asyncio would report it as unread when every caller has hung up.
            task.exception()


async def answered(disk: Awaitable[AnswerT]) -> AnswerT:
    """Wait for the disk's answer. Raises DeadlineError if it does not respond."""
    try:
        async with asyncio.timeout(DISK_LIMIT_S):
            return await disk
    except TimeoutError:
        raise DeadlineError(
            f"the disk of --state-dir has not answered for {DISK_LIMIT_S:g} s; a call takes effect "
            "when it does, "
            "unless the coordinator ends before: make the same call again",
            field="state-dir",
            reason="NOT_SAVED_YET",
        ) from None


def fingerprint_of(request: Message) -> str:
    """A fingerprint that is equal for two equal requests."""
    kind = request.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(kind + b"\0" + request.SerializeToString(deterministic=True)).hexdigest()


def check_same(key: OperationId, former_fingerprint: str, fingerprint: str) -> None:
    """Raise InvalidArgumentError naming operation_id unless both requests are the same."""
    if former_fingerprint != fingerprint:
        raise InvalidArgumentError(
            f"operation_id {key} was used for another request; use a new one for each",
            field="operation_id",
        )
