"""The audit log on disk: who changed the site, and who was refused. A thread writes it, and nobody waits for it.

What operators do has files of its own: others, who can be refused as often as they like, cannot push it out of them.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from edgeshard.domain.audit import OK, AuditEntry
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import DeadlineError, InternalError
from edgeshard_coordinator.control.rotated import RotatedLines
from edgeshard_coordinator.core.token_bucket import TokenBucket

OTHERS_PER_S = 5.0
"""Entries of others than operators that are written; more are counted."""
MOST_WAITING = 4096
"""Entries that the disk may be behind; more are counted."""
_BATCH = 256
_LONGEST = 200
"""Characters of a field: a target may be whatever a caller wrote."""
_ANSWER_LIMIT_S = 5.0
_STOP_LIMIT_S = 1.0
_SUPPRESSED = "SUPPRESSED"

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Wanted:
    """The newest `count` entries, all that were added before it among them."""

    count: int
    answer: Future[tuple[AuditEntry, ...]] = field(default_factory=Future)


_Item = tuple[AuditEntry, bool] | _Wanted | None
"""An entry and whether it is an operator's; None for the end."""


class AuditLog:
    """`add` entries from the event loop's thread. `directory` is None where nothing is kept."""

    def __init__(self, directory: Path | None, clock: Clock) -> None:
        self._keeps = directory is not None
        self._clock = clock
        where = directory or Path()
        self._operators, self._others = RotatedLines(where, "operators"), RotatedLines(where, "others")
        self._pace = TokenBucket(OTHERS_PER_S, 1.0)
        self._suppressed = 0
        self._queue: queue.Queue[_Item] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lost = 0

    def start(self) -> None:
        if self._keeps and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """What was added is on disk, unless the disk says nothing for a second. A second call changes nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tell_suppressed()
            self._put(None)
            await asyncio.to_thread(thread.join, _STOP_LIMIT_S)

    def add(
        self, who: str, what: str, target: str, result: str = OK, address: str = "", *, by_operator: bool = True
    ) -> None:
        """Returns at once. Entries that are not `by_operator` are written at a bounded rate, and counted beyond it."""
        if not self._keeps:
            return
        if not by_operator:
            now = self._clock.now()
            if self._pace.debt_s(now) > 0:
                self._suppressed += 1
                return
            self._pace = self._pace.charged(1, now)
        who, what, target, result, address = (text[:_LONGEST] for text in (who, what, target, result, address))
        entry = AuditEntry(_time(), who, what, target, result, address, self._suppressed)
        self._put_entry(entry, by_operator)

    async def newest(self, count: int) -> tuple[AuditEntry, ...]:
        """At most so many, the oldest first, all that were added until now among them.

        Raises DeadlineError where the disk says nothing, InternalError where it cannot be read.
        """
        if self._thread is None:
            return ()
        self._tell_suppressed()
        wanted = _Wanted(count)
        try:
            if not self._put(wanted):
                raise TimeoutError  # It is as far behind as it may be.
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                return await asyncio.wrap_future(wanted.answer)
        except TimeoutError:
            raise DeadlineError(
                f"the disk of --state-dir has not answered for {_ANSWER_LIMIT_S:g} s", field="state-dir"
            ) from None
        except OSError as error:
            raise InternalError(f"the audit log cannot be read: {error.strerror}", field="state-dir") from None

    def _put(self, item: _Item) -> bool:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _put_entry(self, entry: AuditEntry, by_operator: bool) -> None:
        """It and those that it counts are counted by the next one where there is no room."""
        self._suppressed = 0 if self._put((entry, by_operator)) else entry.suppressed + (entry.result != _SUPPRESSED)

    def _tell_suppressed(self) -> None:
        if self._suppressed:
            self._put_entry(AuditEntry(_time(), "", "", "", _SUPPRESSED, "", self._suppressed), False)

    # The thread that has the files

    def _work(self) -> None:
        items: list[_Item] = []
        while None not in items:
            items = self._next_items()
            entries = [item for item in items if isinstance(item, tuple)]
            self._write(self._operators, [entry for entry, by_operator in entries if by_operator])
            self._write(self._others, [entry for entry, by_operator in entries if not by_operator])
            for item in items:
                if isinstance(item, _Wanted) and item.answer.set_running_or_notify_cancel():
                    self._answer(item)
        self._operators.close()
        self._others.close()

    def _write(self, file: RotatedLines, entries: list[AuditEntry]) -> None:
        """Those that the disk refuses are counted by the next entry that it takes."""
        if not entries:
            return
        entries[0] = replace(entries[0], suppressed=entries[0].suppressed + self._lost)
        try:
            file.append([_line(entry) for entry in entries])
        except OSError as error:
            if self._lost == 0:
                log.error("audit_not_written", error=error.strerror or str(error))
            self._lost = sum(entry.suppressed + (entry.result != _SUPPRESSED) for entry in entries)
        else:
            self._lost = 0

    def _answer(self, wanted: _Wanted) -> None:
        try:
            lines = [*self._operators.newest(wanted.count), *self._others.newest(wanted.count)]
        except OSError as error:
            wanted.answer.set_exception(error)
        else:
            entries = sorted(filter(None, map(_entry, lines)), key=lambda entry: entry.time)
            wanted.answer.set_result(tuple(entries[-wanted.count :]))

    def _next_items(self) -> list[_Item]:
        items = [self._queue.get()]
        while len(items) < _BATCH:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return items


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _line(entry: AuditEntry) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


def _entry(line: bytes) -> AuditEntry | None:
    """None for a line that is no entry of this version, or could not be sent as one."""
    try:
        entry = AuditEntry(**json.loads(line))
        for text in (entry.time, entry.who, entry.what, entry.target, entry.result, entry.address):
            text.encode()
        return entry if 0 <= entry.suppressed < 2**63 else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
