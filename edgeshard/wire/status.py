"""Errors to gRPC statuses and back, by the one table in `edgeshard.domain.errors`.

A status carries google.rpc details: ErrorInfo (reason, domain, field), BadRequest (the field) and
RetryInfo.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from edgeshard.domain.errors import (
    ERROR_BY_CODE,
    Code,
    DeadlineError,
    EdgeShardError,
    InternalError,
    UnauthenticatedError,
    UnavailableError,
)

DOMAIN = "edgeshard"
DETAILS_KEY = "grpc-status-details-bin"
# Only refusals that name a checked certificate. A handshake that was merely cut short, as by a slow
# link or a process that ends, may succeed the next time.
_TLS_REFUSALS = ("CERTIFICATE_VERIFY_FAILED", "TSI_PROTOCOL_FAILURE", "SSL_ERROR")
_GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: EdgeShardError) -> status_pb2.Status:
    status = status_pb2.Status(code=int(error.code), message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    status.details.add().Pack(info)
    if error.field and error.code is Code.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_to_bytes(error: EdgeShardError) -> bytes:
    """The error for another process; `error_from_bytes` reads it."""
    return bytes(to_status(error).SerializeToString())


def error_from_bytes(data: bytes) -> EdgeShardError:
    """The typed error that `error_to_bytes` wrote."""
    return _from_status(status_pb2.Status.FromString(data))


class AbortContext(Protocol):
    """The part of a grpc.aio servicer context that ends a call."""

    async def abort(
        self, code: grpc.StatusCode, details: str = ..., trailing_metadata: Any = ...
    ) -> Any: ...


async def abort(context: AbortContext, error: EdgeShardError) -> None:
    """End the call with the error's status and details. Never returns normally."""
    details = to_status(error).SerializeToString()
    await context.abort(_GRPC_CODES[int(error.code)], error.message, ((DETAILS_KEY, details),))


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether a daemon of ours ended the call, and not the connection to it."""
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def from_rpc_error(error: grpc.aio.AioRpcError, target: str = "") -> EdgeShardError:
    """The typed error for a failed call; `target` is the server, for the message."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            return _from_status(
                status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            )
    code, details = error.code(), error.details() or ""
    where = f" {target}" if target else ""
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(mark in details for mark in _TLS_REFUSALS):
            return UnauthenticatedError(
                f"the connection to{where} was refused by TLS: check --tls-ca, --tls-cert and "
                f"--tls-key ({details})",
                field="tls-ca",
                reason="TLS_HANDSHAKE",
            )
        hint = (
            "; or it refused this certificate: check --tls-cert and the clocks of both machines"
            if "Socket closed" in details
            else ""
        )
        return UnavailableError(f"cannot reach{where}: {details}{hint}", retry_after_s=1.0)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"no answer from{where} within the timeout")
    number = code.value[0]
    name = code_pb2.Code.Name(number) if number in code_pb2.Code.values() else "UNKNOWN"
    return ERROR_BY_CODE.get(number, InternalError)(details or name, reason=name)


def _from_status(status: status_pb2.Status) -> EdgeShardError:
    reason = ""
    field = ""
    retry = None
    for detail in status.details:
        info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, field = info.reason, info.metadata.get("field", "")
        elif detail.Unpack(delay):
            retry = delay.retry_delay.ToNanoseconds() / 1e9
    return ERROR_BY_CODE.get(status.code, InternalError)(
        status.message, field=field, reason=reason, retry_after_s=retry
    )
