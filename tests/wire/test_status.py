"""Errors across the wire: the raised error arrives, and foreign failures get the right name."""

from __future__ import annotations

import grpc
import pytest

from edgeshard.domain.errors import (
    ERROR_BY_CODE,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)
from edgeshard.proto.v1 import common_pb2
from edgeshard.wire.codec import from_failure, to_failure
from edgeshard.wire.status import DETAILS_KEY, from_rpc_error, to_status


def rpc_error(
    code: grpc.StatusCode, details: str, trailing: bytes | None = None
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*([(DETAILS_KEY, trailing)] if trailing else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


@pytest.mark.parametrize("kind", sorted(set(ERROR_BY_CODE.values()), key=str))
def test_an_error_arrives_as_it_was_raised(kind: type[EdgeShardError]) -> None:
    error = kind("too bad", field="prompt", reason="SOME_REASON", retry_after_s=1.5)
    grpc_code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
    over_rpc = from_rpc_error(rpc_error(grpc_code, "too bad", to_status(error).SerializeToString()))
    for arrived in (over_rpc, from_failure(to_failure(error))):
        assert type(arrived) is kind
        assert (arrived.message, arrived.field, arrived.reason, arrived.retry_after_s) == (
            "too bad", "prompt", "SOME_REASON", 1.5,
        )  # fmt: skip


def test_a_refused_certificate_is_told_from_a_handshake_cut_short() -> None:
    refused = "SSL_ERROR_SSL: error:1000007d: CERTIFICATE_VERIFY_FAILED: self signed certificate"
    assert isinstance(
        from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, refused), "x:1"), UnauthenticatedError
    )
    for passing in (
        "Handshake read failed (Endpoint closing)",
        "tcp handshaker shutdown",
        "Socket closed",
    ):
        error = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, passing), "x:1")
        assert isinstance(error, UnavailableError) and "x:1" in error.message
    assert "--tls-cert" in error.message


def test_an_untyped_refusal_keeps_its_code() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "no"))
    assert isinstance(error, InvalidArgumentError) and error.message == "no"


def test_a_message_with_bytes_that_are_no_text_can_be_sent() -> None:
    """As one that quotes a path: an answer that cannot be sent would end the node that gives it."""
    failure = to_failure(InternalError("cannot read /models/caf\udce9"))
    assert from_failure(failure).message == "cannot read /models/caf?"


@pytest.mark.parametrize(
    ("sent", "wait_s"),
    [
        (1.5, 1.5),
        (0.0, None),
        (-1e30, None),
        (float("nan"), None),
        (float("inf"), None),
        (1e9, 86_400),
    ],
)
def test_a_wait_of_a_failure_fits_into_a_status(sent: float, wait_s: float | None) -> None:
    error = from_failure(common_pb2.Failure(message="m", retry_after_s=sent))
    assert error.retry_after_s == wait_s
    assert to_status(error).message == "m"
