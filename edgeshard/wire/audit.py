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


def audit_check_to_wire(check: AuditCheck) -> pb.AuditCheck:
    return pb.AuditCheck(
        file=check.file, lines=check.lines, sealed=check.sealed, broken_at=check.broken_at, why=check.why
    )


def audit_check_from_wire(message: pb.AuditCheck) -> AuditCheck:
    return AuditCheck(message.file, message.lines, message.sealed, message.broken_at, message.why)
