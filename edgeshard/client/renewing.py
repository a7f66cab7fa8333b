"""Asking the coordinator for another certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.proto.v1.identity_pb2_grpc import IdentityServiceStub
from edgeshard.rpc.clocks import explained
from edgeshard.wire.status import from_rpc_error

if TYPE_CHECKING:
    from edgeshard.rpc.renewal import Renew

TIMEOUT_S = 10.0


def renew_over(channel: grpc.aio.Channel, target: str) -> Renew:
    """The call of `keep_renewed`, over a channel to the coordinator at `target`."""
    stub = IdentityServiceStub(channel)

    async def renew(request: bytes) -> tuple[bytes, bytes]:
        try:
            answer = await stub.Renew(pb.RenewRequest(request=request), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error, f"the coordinator at {target}")
            raise await explained(typed, target) from None
        return answer.certificate, answer.authorities

    return renew
