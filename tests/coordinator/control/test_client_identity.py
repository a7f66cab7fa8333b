"""Whose request it is comes from the certificate a caller showed, and travels to the head."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from edgeshard_coordinator.control.services.inference_service import client_of

from edgeshard.domain.identity import Role
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Generation
from edgeshard.domain.requests.head import StartRequest
from edgeshard.rpc import access
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.head_stream import head_command_from_wire, head_command_to_wire
from tests.support.identities import Identities

METHOD = "/tests.Identity/Name"


class Identity(grpc.GenericRpcHandler):
    """Answers with the identity of the caller."""

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        async def name(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return client_of(context).encode()

        return grpc.unary_unary_rpc_method_handler(name) if details.method == METHOD else None


@pytest.mark.parametrize("name", ["tenant-a", ""])
async def test_a_caller_is_who_its_certificate_says(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "ROLES", {METHOD: frozenset({Role.CLIENT})})
    identities = Identities(tmp_path)
    tls = identities.of(Role.CLIENT, name) if name else None
    server = Server("127.0.0.1:0", identities.coordinator() if name else None)
    server.grpc.add_generic_rpc_handlers((Identity(),))
    address = await server.start()
    try:
        async with open_channel(address, tls) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
            assert (await call(b"", timeout=20)).decode() == (f"client/{name}" if name else "")
    finally:
        await server.stop(0)


def test_the_head_hears_whose_request_it_is() -> None:
    start = StartRequest(RequestId("r"), Generation((1,)), client="tenant-a")
    assert head_command_from_wire(head_command_to_wire(start)) == start
