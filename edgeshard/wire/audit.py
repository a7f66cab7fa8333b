"""Entries of the audit log: message <-> value."""

from __future__ import annotations

from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.common import message_of, value_of


def audit_entry_to_wire(entry: AuditEntry) -> pb.AuditEntry:
    return message_of(entry, pb.AuditEntry)


def audit_entry_from_wire(message: pb.AuditEntry) -> AuditEntry:
    return value_of(message, AuditEntry)


def audit_checks_to_wire(checks: tuple[AuditCheck, ...]) -> pb.AuditChecks:
    return pb.AuditChecks(checks=[message_of(check, pb.AuditCheck) for check in checks])


def audit_checks_from_wire(message: pb.AuditChecks) -> tuple[AuditCheck, ...]:
    return tuple(value_of(check, AuditCheck) for check in message.checks)
