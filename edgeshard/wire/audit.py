"""Entries of the audit log: message <-> value."""

from __future__ import annotations

from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.codec import pair

audit_entry_to_wire, audit_entry_from_wire = pair(AuditEntry, pb.AuditEntry)
_check_to_wire, _check_from_wire = pair(AuditCheck, pb.AuditCheck)


def audit_checks_to_wire(checks: tuple[AuditCheck, ...]) -> pb.AuditChecks:
    return pb.AuditChecks(checks=map(_check_to_wire, checks))


def audit_checks_from_wire(message: pb.AuditChecks) -> tuple[AuditCheck, ...]:
    return tuple(map(_check_from_wire, message.checks))
