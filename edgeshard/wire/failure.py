"""Errors as parts of messages: message <-> value. As the end of a call they are a status (`edgeshard.wire.status`)."""

from __future__ import annotations

import math

from edgeshard.domain.errors import ERROR_BY_CODE, EdgeShardError, InternalError
from edgeshard.domain.ids import MAX_ID_LENGTH
from edgeshard.proto.v1 import common_pb2 as pb

MAX_RETRY_AFTER_S = 86_400.0


def to_failure(error: EdgeShardError) -> pb.Failure:
    return pb.Failure(
        code=int(error.code),
        reason=error.reason,
        field=error.field,
        # A path in it may hold bytes that are no text, which a message cannot.
        message=error.message.encode("utf-8", "replace").decode(),
        retry_after_s=error.retry_after_s or 0.0,
    )


def from_failure(failure: pb.Failure) -> EdgeShardError:
    """The error of a message. Errors cut long messages and fields themselves. A wait that is none is left out, and one
    of more than a day is a day."""
    retry_after_s = failure.retry_after_s
    is_wait = math.isfinite(retry_after_s) and retry_after_s > 0
    kind = ERROR_BY_CODE.get(failure.code, InternalError)
    return kind(
        failure.message,
        field=failure.field,
        reason=failure.reason[:MAX_ID_LENGTH],
        retry_after_s=min(retry_after_s, MAX_RETRY_AFTER_S) if is_wait else None,
    )
