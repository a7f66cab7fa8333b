"""What is written down, and that writing holds up nobody."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control import audit_log
from edgeshard_coordinator.control.audit_log import AuditLog

from edgeshard.domain.audit import AuditEntry
from edgeshard.domain.errors import DeadlineError, InternalError

pytestmark = pytest.mark.timing


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


@pytest.fixture
async def log(tmp_path: Path) -> Any:
    made = AuditLog(tmp_path / "audit", Clock())
    made.start()
    yield made
    await made.stop()


def said(entries: tuple[AuditEntry, ...]) -> list[tuple[str, str, int]]:
    return [(entry.who, entry.result, entry.suppressed) for entry in entries]


async def test_entries_are_read_as_they_were_added_and_outlive_the_process(tmp_path: Path) -> None:
    for run in range(2):
        log = AuditLog(tmp_path / "audit", Clock())
        log.start()
        log.add("operator/admin", "Deploy", f"tale-{run}", address="10.0.0.1:5")
        await log.stop()
    log.start()
    found = await log.newest(10)
    assert [entry.target for entry in found] == ["tale-0", "tale-1"]
    assert found[0] == AuditEntry(found[0].time, "operator/admin", "Deploy", "tale-0", "ok", "10.0.0.1:5")
    assert found[0].time.endswith("+00:00") and len(await log.newest(1)) == 1
    await log.stop()


async def test_others_are_written_at_a_bounded_rate_and_the_rest_is_counted(log: Any) -> None:
    for _ in range(1000):
        log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    log.add("operator/admin", "Deploy", "tale")
    found = await log.newest(1000)
    assert len(found) <= 2 * audit_log.OTHERS_PER_S + 1
    assert sum(entry.suppressed for entry in found) + len(found) == 1001
    log._clock.seconds += 10.0
    log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    assert said(await log.newest(1)) == [("client/app", "ROLE", 0)]


async def test_a_count_does_not_wait_for_the_next_entry(log: Any) -> None:
    for _ in range(100):
        log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    *written, last = await log.newest(1000)
    assert last.result == "SUPPRESSED" and last.suppressed == 100 - len(written)


async def test_others_cannot_push_out_what_operators_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "OTHERS_PER_S", 1e9)
    monkeypatch.setattr(audit_log, "MOST_WAITING", 10**6)
    log = AuditLog(tmp_path / "audit", Clock())
    log._others._limit_bytes = 10_000
    log.start()
    log.add("operator/admin", "Deploy", "tale")
    for _ in range(1000):
        log.add("client/app", "Deploy", "x" * 10_000, "ROLE", by_operator=False)
    found = await log.newest(1000)
    await log.stop()
    assert len(found) < 200 and found[0].who == "operator/admin"
    assert all(len(entry.target) <= 200 for entry in found)


async def test_a_disk_that_refuses_stops_nothing_and_is_told_of(log: Any, tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("in the way")
    for number in range(3):
        log.add("operator/admin", "Deploy", f"lost-{number}")
        with pytest.raises(InternalError):
            await log.newest(1)
    (tmp_path / "audit").unlink()
    log.add("operator/admin", "Deploy", "kept")
    assert said(await log.newest(10)) == [("operator/admin", "ok", 3)]


async def test_a_disk_that_hangs_holds_up_nobody(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "_ANSWER_LIMIT_S", 0.1)
    answers, append = threading.Event(), log._operators.append

    def hung(lines: Any) -> None:
        answers.wait(60)
        append(lines)

    log._operators.append = hung
    more = 2 * audit_log.MOST_WAITING
    for _ in range(more):
        log.add("operator/admin", "Deploy", "tale")
    with pytest.raises(DeadlineError):
        await log.newest(1)
    answers.set()
    async with asyncio.timeout(60):
        while True:
            if log._queue.empty():
                break
            await asyncio.sleep(0.01)
    monkeypatch.setattr(audit_log, "_ANSWER_LIMIT_S", 60.0)
    found = await log.newest(2 * more)
    assert sum(entry.suppressed for entry in found) + sum(entry.result == "ok" for entry in found) == more


async def test_without_a_directory_nothing_is_kept() -> None:
    log = AuditLog(None, Clock())
    log.start()
    log.add("operator/admin", "Deploy", "tale")
    assert await log.newest(10) == () and log._thread is None
    await log.stop()


async def test_lines_that_are_no_entries_are_left_out(log: Any, tmp_path: Path) -> None:
    log.add("operator/admin", "Deploy", "tale")
    (entry,) = await log.newest(1)
    with (tmp_path / "audit" / "operators.jsonl").open("a") as file:
        file.write('not json\n[1]\n{"who": "me"}\n' + "[" * 100_000 + "\n")
        for changed in ({"time": 1}, {"who": None}, {"target": "\ud800"}, {"suppressed": -1}, {"suppressed": "1"}):
            file.write(json.dumps({**asdict(entry), **changed}) + "\n")
    assert [entry.target for entry in await log.newest(10)] == ["tale"]
