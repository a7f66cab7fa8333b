"""Every method has declared roles, and a live server holds callers to them."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from edgeshard import proto
from edgeshard.domain.errors import DeniedError
from edgeshard.domain.identity import Role
from edgeshard.rpc.access import ROLES, WITHOUT_CERTIFICATE, check_access
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.server import Server
from edgeshard.wire.status import from_rpc_error
from tests.support.identities import Identities, trusting_both


def services() -> Iterator[Any]:
    """The descriptors of all services, of the project's own protocol and of health."""
    for path in sorted((Path(proto.__file__).parent / "v1").glob("*_pb2.py")):
        module = importlib.import_module(f"edgeshard.proto.v1.{path.stem}")
        yield from module.DESCRIPTOR.services_by_name.values()
    yield from health_pb2.DESCRIPTOR.services_by_name.values()


METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in services()
    for method in service.methods
}


def test_every_method_has_roles_and_nothing_else_has() -> None:
    """But for those that are served to who has no certificate yet, on a listener of their own."""
    assert set(ROLES) | set(WITHOUT_CERTIFICATE) == set(METHODS) and not set(
        WITHOUT_CERTIFICATE
    ) & set(ROLES)
    assert all(ROLES.values())


class Anything(grpc.GenericRpcHandler):
    """Each method answers with nothing, in the form that its descriptor wants."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = METHODS.get(str(details.method))
        if method is None or str(details.method).startswith("/grpc.health"):
            return None

        async def one(request: Any, context: Any) -> bytes:
            return b""

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            yield b""

        behaviour = many if method.server_streaming else one
        return getattr(grpc, f"{form_of(method)}_rpc_method_handler")(behaviour)


async def called(channel: grpc.aio.Channel, path: str) -> grpc.StatusCode:
    """The status of a call without content; for a call that would stay open, once it has
    answered."""
    method = METHODS[path]
    call: Any = getattr(channel, form_of(method))(path)
    call = call(timeout=20) if method.client_streaming else call(b"", timeout=20)
    try:
        if method.client_streaming:
            await call.done_writing()
        if path.endswith("Health/Watch"):
            return (
                grpc.StatusCode.OK if await call.read() is not grpc.aio.EOF else await call.code()
            )
        if method.server_streaming:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        if path.endswith("Health/Watch"):
            call.cancel()
    return grpc.StatusCode(await call.code())


def form_of(method: Any) -> str:
    """`unary_stream` and the like: the forms of the client's messages and of the server's."""
    return "_".join(
        "stream" if streams else "unary"
        for streams in (method.client_streaming, method.server_streaming)
    )


async def test_every_role_may_call_what_the_table_says_and_nothing_else(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.coordinator())
    server.grpc.add_generic_rpc_handlers((Anything(),))
    address = await server.start()
    met = {}
    try:
        for role in Role:
            async with open_channel(address, identities.of(role, "coordinator")) as channel:
                for path in METHODS:
                    met[role, path] = await called(channel, path)
    finally:
        await server.stop(0)
    denied, good = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK
    assert met == {
        (role, path): good if role in ROLES.get(path, ()) else denied
        for role in Role
        for path in METHODS
    }


async def refused(address: str, files: Any) -> Any:
    """The typed error of a health check."""
    async with open_channel(address, files) as channel:
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            await call(b"", timeout=20)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, address)
    return None


async def test_strangers_are_refused_before_any_message(tmp_path: Path) -> None:
    """Strangers of another authority, and of another site of the same authority."""
    ours, theirs = Identities(tmp_path / "ours"), Identities(tmp_path / "theirs")
    server = Server("127.0.0.1:0", ours.coordinator())
    address = await server.start()
    try:
        assert await refused(address, ours.of(Role.CLIENT, "app")) is None
        stranger = theirs.of(Role.CLIENT, "app")
        assert await refused(address, stranger) is not None
        assert (
            await refused(address, trusting_both(stranger, ours.of(Role.CLIENT, "app"))) is not None
        )
    finally:
        await server.stop(0)


class Shown:
    """A call's context whose caller showed these names."""

    def __init__(self, *uris: str, kind: bytes = b"ssl") -> None:
        self._shown = {
            "transport_security_type": [kind],
            "peer_uri": [uri.encode() for uri in uris],
        }

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._shown


@pytest.mark.parametrize(
    ("uris", "reason"),
    [
        ((), "NO_ROLE"),
        (("edgeshard://site/client/app", "edgeshard://site/operator/app"), "NO_ROLE"),
        (("https://site/client/app",), "NO_ROLE"),
        (("edgeshard://site/root/app",), "NO_ROLE"),
        (("edgeshard://site/client/../app",), "NO_ROLE"),
        (("edgeshard://site/client/App",), "NO_ROLE"),
        (("edgeshard://other/client/app",), "SITE"),
        (("edgeshard://site/agent/app",), "ROLE"),
    ],
)
def test_a_certificate_says_who_calls_or_its_holder_is_nobody(
    uris: tuple[str, ...], reason: str
) -> None:
    method = "/edgeshard.proto.v1.InferenceService/Generate"
    check_access(Shown("edgeshard://site/client/app"), method, "site", Denials())
    with pytest.raises(DeniedError) as refusal:
        check_access(Shown(*uris), method, "site", Denials())
    assert refusal.value.reason == reason


def test_plaintext_is_nobody_where_certificates_are_asked_for() -> None:
    plain = Shown(kind=b"insecure")
    check_access(plain, "/tests.Any/Thing", None, Denials())
    with pytest.raises(DeniedError):
        check_access(plain, "/grpc.health.v1.Health/Check", "site", Denials())
