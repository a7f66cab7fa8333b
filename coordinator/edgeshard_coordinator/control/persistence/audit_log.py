"""The audit log on disk: each change of the site and each refusal. A thread writes it, so no caller
waits for it.

Operators' actions have files of their own, and so have all others'. A caller who is refused
arbitrarily often thus displaces neither. Each kind of refusal has its own rate limit: many of one
kind hide no other.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from edgeshard.domain.audit import OK, SUPPRESSED, AuditCheck, AuditEntry
from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import DeadlineError, FailedPreconditionError, InternalError
from edgeshard_coordinator.control.persistence.rotated import RotatedLines
from edgeshard_coordinator.core.values.seals import SealKey
from edgeshard_coordinator.core.values.token_bucket import TokenBucket

REFUSALS_PER_S = 1.0
"""Refusals of one kind that are written in a second; more are counted."""
REFUSALS_HELD = 10
"""Refusals of one kind that are written at once."""
REPEATS_HELD = 60
"""Calls of one method by one member other than an operator that are written at once, and then one a
second; more are counted. An honest member renews its certificate or changes its address now and
then."""
MOST_KINDS = 1024
TOLD_EVERY_S = 60.0
"""Seconds between two entries that count the unwritten ones."""
MOST_WAITING = 4096
"""Entries that may wait for the disk; further ones are only counted."""
_BATCH = 256
_LONGEST = 200
"""Characters of a field, since a caller may write any target."""
_ANSWER_LIMIT_S = 5.0
_STOP_LIMIT_S = 1.0

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Question:
    """A query to the files, which `work` answers in their thread, after all entries that were added
    before it."""

    work: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Kind:
    """Entries that are counted together if they are not written: of `what`, with this result, by
    `who` or all."""

    file: RotatedLines
    what: str = ""
    result: str = ""
    who: str = ""
    pace: TokenBucket | None = None
    suppressed: int = 0


_Item = tuple[AuditEntry, RotatedLines] | _Question | None
"""An entry and its destination, or None as the end."""


class AuditLog:
    """`add` entries from the event loop's thread. `directory` is None if no log is kept, `key` is
    None if it is not sealed."""

    def __init__(self, directory: Path | None, clock: Clock, key: SealKey | None = None) -> None:
        self._keeps = directory is not None
        self._clock = clock
        self._key = key
        where = directory or Path()
        self._operators, self._others, self._refusals = self._files = tuple(
            RotatedLines(where, name, key=key) for name in ("operators", "others", "refusals")
        )
        self._of_operators = _Kind(self._operators)
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._told_at = 0.0
        self._queue: queue.Queue[_Item] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lost = 0

    def start(self) -> None:
        if self._keeps and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """Write all that was added, unless the disk does not respond for a second. A second call
        changes nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tell_suppressed()
            self._put(None)
            await asyncio.to_thread(thread.join, _STOP_LIMIT_S)

    def add(
        self,
        who: str,
        what: str,
        target: str,
        result: str = OK,
        address: str = "",
        *,
        by_operator: bool = True,
        kind: str = "",
    ) -> None:
        """Add an entry; returns at once.

        Deeds are written, of operators and of others. Refusals of others are written at a bounded
        rate for each result and `kind` (else `what`), and counted beyond it.
        """
        if not self._keeps:
            return
        now = self._clock.now()
        if now - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            self._tell_suppressed()
        entry_kind = (
            self._of_operators if by_operator else self._kind(kind or what, result, who, now)
        )
        if entry_kind.pace is not None:
            if entry_kind.pace.debt_s(now) > 0:
                entry_kind.suppressed += 1
                return
            entry_kind.pace = entry_kind.pace.charged(1, now)
        who, what, target, result, address = (
            text[:_LONGEST] for text in (who, what, target, result, address)
        )
        self._put_entry(
            AuditEntry(_time(), who, what, target, result, address, entry_kind.suppressed),
            entry_kind,
        )

    def _kind(self, what: str, result: str, who: str, now: float) -> _Kind:
        is_done = result == OK
        key = (what, f"{OK} {who}" if is_done else result)
        kind = self._kinds.get(key)
        if kind is None and len(self._kinds) >= MOST_KINDS:
            self._forget_quiet(now)
            if is_done and len(self._kinds) >= MOST_KINDS:
                return _Kind(self._others)
            if len(self._kinds) >= MOST_KINDS:
                what = ""
                result = ""
                key = ("", "")
                kind = self._kinds.get(key)
        if kind is None and is_done:
            kind = _Kind(self._others, what, result, who, TokenBucket(1.0, REPEATS_HELD - 1.0))
        elif kind is None:
            pace = TokenBucket(REFUSALS_PER_S, (REFUSALS_HELD - 1) / REFUSALS_PER_S)
            kind = _Kind(self._refusals, what, result, pace=pace)
        self._kinds[key] = kind
        return kind

    def _forget_quiet(self, now: float) -> None:
        for key, kind in list(self._kinds.items()):
            if not kind.suppressed and (kind.pace is None or kind.pace.is_full(now)):
                del self._kinds[key]

    async def newest(self, count: int) -> tuple[AuditEntry, ...]:
        """The newest entries, the oldest first: at most `count` of all that were added until now.
        Refusals are at most half of them, if there are enough other entries.

        Raises DeadlineError if the disk does not respond, InternalError if it cannot be read.
        """
        return () if self._thread is None else await self._answered(partial(self._newest, count))

    async def check(self) -> tuple[AuditCheck, ...]:
        """The verdict of the seals on each file, with all that was added until now.

        Raises FailedPreconditionError if the log is not sealed, and as `newest`.
        """
        if self._key is None:
            raise FailedPreconditionError(
                "the audit log of this coordinator is not sealed: it has no --ca-key, the key of "
                "the site's authority",
                field="ca-key",
                reason="NO_SEALS",
            )
        return () if self._thread is None else await self._answered(self._checks)

    async def _answered(self, work: Callable[[], Any]) -> Any:
        self._tell_suppressed()
        question = _Question(work)
        try:
            if not self._put(question):
                raise TimeoutError  # The queue is full.
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                return await asyncio.wrap_future(question.answer)
        except TimeoutError:
            raise DeadlineError(
                f"the disk of --state-dir has not answered for {_ANSWER_LIMIT_S:g} s",
                field="state-dir",
            ) from None
        except OSError as error:
            raise InternalError(
                f"the audit log cannot be read: {error.strerror}", field="state-dir"
            ) from None

    def _put(self, item: _Item) -> bool:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _put_entry(self, entry: AuditEntry, kind: _Kind) -> None:
        """Put an entry in the queue. If the queue is full, the next one of its kind counts it, and
        all that it counts."""
        is_put = self._put((entry, kind.file))
        kind.suppressed = 0 if is_put else entry.suppressed + (entry.result != SUPPRESSED)

    def _tell_suppressed(self) -> None:
        for kind in (self._of_operators, *self._kinds.values()):
            if kind.suppressed:
                entry = AuditEntry(
                    _time(), kind.who, kind.what, kind.result, SUPPRESSED, "", kind.suppressed
                )
                self._put_entry(entry, kind)

    # The thread that has the files

    def _work(self) -> None:
        items: list[_Item] = []
        while None not in items:
            items = self._next_items()
            for file in self._files:
                self._write(
                    file, [item[0] for item in items if isinstance(item, tuple) and item[1] is file]
                )
            for item in items:
                if isinstance(item, _Question) and item.answer.set_running_or_notify_cancel():
                    _answer(item)
        for file in self._files:
            # the last seal: what it would seal is sealed by the next process
            with suppress(OSError):
                file.close()

    def _write(self, file: RotatedLines, entries: list[AuditEntry]) -> None:
        """Write entries; the next one that the disk takes counts those that it refuses."""
        if not entries:
            return
        entries[0] = replace(entries[0], suppressed=entries[0].suppressed + self._lost)
        try:
            file.append([_line(entry) for entry in entries])
        except OSError as error:
            if self._lost == 0:
                log.error("audit_not_written", error=error.strerror or str(error))
            self._lost = sum(entry.suppressed + (entry.result != SUPPRESSED) for entry in entries)
        else:
            self._lost = 0

    def _checks(self) -> tuple[AuditCheck, ...]:
        return tuple(check for file in self._files for check in file.check())

    def _newest(self, count: int) -> tuple[AuditEntry, ...]:
        done = _entries([*self._operators.newest(count), *self._others.newest(count)])
        refused = _entries(self._refusals.newest(count))
        oldest = sorted(entry.time for entry in (*done, *refused))[-count:][:1]
        refusals = [entry for entry in refused if [entry.time] >= oldest]
        room = max((count + 1) // 2, count - len(done))
        refusals = refusals[max(0, len(refusals) - room) :]
        entries = [*done[max(0, len(done) - (count - len(refusals))) :], *refusals]
        return tuple(sorted(entries, key=lambda entry: entry.time))

    def _next_items(self) -> list[_Item]:
        items = [self._queue.get()]
        while len(items) < _BATCH:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return items


def _answer(question: _Question) -> None:
    try:
        question.answer.set_result(question.work())
    except OSError as error:
        question.answer.set_exception(error)


def _entries(lines: list[bytes]) -> list[AuditEntry]:
    return sorted(filter(None, map(_entry, lines)), key=lambda entry: entry.time)


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _line(entry: AuditEntry) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


def _entry(line: bytes) -> AuditEntry | None:
    """The entry of a line; None if it is no entry of this version, or could not be sent as one."""
    try:
        entry = AuditEntry(**json.loads(line))
        for text in (entry.time, entry.who, entry.what, entry.target, entry.result, entry.address):
            text.encode()
        return entry if 0 <= entry.suppressed < 2**63 else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
