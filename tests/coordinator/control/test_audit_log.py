"""The content of the audit log; writing it delays no caller."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence import audit_log
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.core.values.seals import SealKey

from edgeshard.domain.audit import AuditEntry
from edgeshard.domain.errors import DeadlineError, FailedPreconditionError, InternalError

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
    assert found[0] == AuditEntry(
        found[0].time, "operator/admin", "Deploy", "tale-0", "ok", "10.0.0.1:5"
    )
    assert found[0].time.endswith("+00:00") and len(await log.newest(1)) == 1
    await log.stop()


async def test_refusals_are_written_at_a_bounded_rate_and_the_rest_is_counted(log: Any) -> None:
    for _ in range(1000):
        log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    log.add("operator/admin", "Deploy", "tale")
    found = await log.newest(1000)
    assert len(found) <= audit_log.REFUSALS_HELD + 2
    assert sum(entry.suppressed + (entry.result != "SUPPRESSED") for entry in found) == 1001
    log._clock.seconds += 10.0
    log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    assert said(await log.newest(1)) == [("client/app", "ROLE", 0)]


async def test_refusals_hide_nothing_that_was_done(log: Any) -> None:
    """Six thousand of them hid five enrolments, in the log and then in the newest 50."""
    for number in range(5):
        for _ in range(1200):
            log.add("10.0.0.1:1", "Enrol", "guess", "TOKEN", by_operator=False)
        log.add(f"10.0.0.2:{number}", "Enrol", f"t{number}", by_operator=False)
        log._clock.seconds += 60.0
    found = await log.newest(50)
    assert [entry.target for entry in found if entry.result == "ok"] == [
        f"t{number}" for number in range(5)
    ]
    assert (
        sum(entry.suppressed + (entry.result != "SUPPRESSED") for entry in await log.newest(1000))
        == 6005
    )
    assert sum(entry.result != "ok" for entry in await log.newest(4)) == 2


async def test_one_kind_of_refusal_hides_no_other(log: Any) -> None:
    for number in range(1000):
        log.add("client/eve", "Deploy", "tale", "ROLE", by_operator=False)
        log.add("nobody", f"GET /{number}", "", "NO_API_KEY", by_operator=False, kind="HTTP")
    log.add("agent/c", "Register", "b", "IMPERSONATION", by_operator=False)
    found = await log.newest(1000)
    assert ("agent/c", "IMPERSONATION", 0) in said(found)
    assert len(found) <= 2 * (audit_log.REFUSALS_HELD + 1) + 1
    assert {(entry.what, entry.target) for entry in found if entry.result == "SUPPRESSED"} == {
        ("Deploy", "ROLE"),
        ("HTTP", "NO_API_KEY"),
    }


async def test_kinds_without_end_take_no_memory_and_hide_nothing(
    log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "MOST_KINDS", 20)
    for number in range(500):
        log.add("nobody", f"what-{number}", "", "ROLE", by_operator=False)
        log.add(f"10.0.0.2:{number}", "Enrol", f"t{number}", by_operator=False)
    assert len(log._kinds) <= 22
    found = await log.newest(1000)
    assert sum(entry.result == "ok" for entry in found) == 500


async def test_what_one_member_repeats_is_counted_and_pushes_nobody_out(log: Any) -> None:
    log.add("10.0.0.2:1", "Enrol", "t1", by_operator=False)
    for _ in range(5000):
        log.add("agent/eve", "Renew", "", by_operator=False)
    found = await log.newest(1000)
    assert found[0].what == "Enrol" and len(found) == audit_log.REPEATS_HELD + 2
    assert said(found)[-1] == ("agent/eve", "SUPPRESSED", 5000 - audit_log.REPEATS_HELD)


async def test_a_count_is_written_when_nobody_asks(log: Any, tmp_path: Path) -> None:
    for _ in range(100):
        log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    log._clock.seconds += audit_log.TOLD_EVERY_S
    log.add("operator/admin", "Deploy", "tale")
    await log.newest(1)
    text = (tmp_path / "audit" / "refusals.jsonl").read_text()
    assert f'"suppressed": {100 - audit_log.REFUSALS_HELD}' in text


async def test_a_log_without_a_key_says_that_it_is_not_sealed(log: Any) -> None:
    with pytest.raises(FailedPreconditionError) as refusal:
        await log.check()
    assert refusal.value.field == "ca-key"


async def test_seals_are_held_against_the_files_and_shown_to_nobody_as_entries(
    tmp_path: Path,
) -> None:
    key = SealKey(b"k" * 32)
    log = AuditLog(tmp_path, Clock(), key)
    log.start()
    for number in range(250):
        log.add("operator/admin", "Deploy", f"tale-{number}")
    log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    checks = await log.check()
    assert [(check.file, check.lines, check.sealed) for check in checks] == [
        ("operators.jsonl", 253, 253),
        ("refusals.jsonl", 2, 2),
    ]
    assert len(await log.newest(1000)) == 251
    await log.stop()
    again = AuditLog(tmp_path, Clock(), key)
    again.start()
    again.add("operator/admin", "Deploy", "more")
    path = tmp_path / "operators.jsonl"
    path.write_bytes(path.read_bytes().replace(b"tale-120", b"tale-999"))
    assert [(check.file, check.broken_at) for check in await again.check() if check.broken_at] == [
        ("operators.jsonl", 102)
    ]
    await again.stop()


async def test_a_count_does_not_wait_for_the_next_entry(log: Any) -> None:
    for _ in range(100):
        log.add("client/app", "Deploy", "tale", "ROLE", by_operator=False)
    *written, last = await log.newest(1000)
    assert last.result == "SUPPRESSED" and last.suppressed == 100 - len(written)


async def test_others_cannot_push_out_what_operators_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "REFUSALS_PER_S", 1e9)
    monkeypatch.setattr(audit_log, "REFUSALS_HELD", 10**6)
    monkeypatch.setattr(audit_log, "MOST_WAITING", 10**6)
    log = AuditLog(tmp_path / "audit", Clock())
    log._refusals._limit_bytes = 10_000
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
    assert (
        sum(entry.suppressed for entry in found) + sum(entry.result == "ok" for entry in found)
        == more
    )


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
        for changed in (
            {"time": 1},
            {"who": None},
            {"target": "\ud800"},
            {"suppressed": -1},
            {"suppressed": "1"},
        ):
            file.write(json.dumps({**asdict(entry), **changed}) + "\n")
    assert [entry.target for entry in await log.newest(10)] == ["tale"]
