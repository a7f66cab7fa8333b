"""Entries of the audit log: message <-> value."""

from __future__ import annotations

from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.proto.v1 import admin_pb2 as pb


def audit_entry_to_wire(entry: AuditEntry) -> pb.AuditEntry:
    return pb.AuditEntry(
        time=entry.time,
        who=entry.who,
        what=entry.what,
        target=entry.target,
        result=entry.result,
        address=entry.address,
        suppressed=entry.suppressed,
    )


def audit_entry_from_wire(message: pb.AuditEntry) -> AuditEntry:
    return AuditEntry(
        message.time,
        message.who,
        message.what,
        message.target,
        message.result,
        message.address,
        message.suppressed,
    )


def audit_checks_to_wire(checks: tuple[AuditCheck, ...]) -> pb.AuditChecks:
    return pb.AuditChecks(
        checks=[
            pb.AuditCheck(
                file=check.file, lines=check.lines, sealed=check.sealed, broken_at=check.broken_at, why=check.why
            )
            for check in checks
        ]
    )


def audit_checks_from_wire(message: pb.AuditChecks) -> tuple[AuditCheck, ...]:
    return tuple(
        AuditCheck(check.file, check.lines, check.sealed, check.broken_at, check.why) for check in message.checks
    )
