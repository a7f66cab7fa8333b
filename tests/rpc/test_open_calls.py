"""The open calls of a principal end when it is revoked: every method, in every form of a
servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeshard.domain.identity import Denial, Principal, Role
from edgeshard.identity.certificates import serial_of
from edgeshard.rpc.access import ROLES
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from tests.rpc.test_access import METHODS, form_of
from tests.support.identities import Identities

pytestmark = pytest.mark.timing
SECONDS = 10.0
"""A quiet machine needs 0.1 s; a call that is left open stays so for good."""
SENDS = ("generator", "writes", "sends on and on")


class Held(grpc.GenericRpcHandler):
    """Every method except health's sends one message, if it may, and stays."""

    def __init__(self, way: str) -> None:
        self._way = way
        self.ended: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        path = str(details.method)
        method = METHODS.get(path)
        if method is None or path.startswith("/grpc.health"):
            return None

        async def one(request: Any, context: Any) -> bytes:
            try:
                await asyncio.sleep(600)
            finally:
                self.ended.append(path)
            return b""

        async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
            try:
                yield b""
                while self._way == "sends on and on":
                    await asyncio.sleep(0.001)
                    yield b"x" * 1000
                await asyncio.sleep(600)
            finally:
                self.ended.append(path)

        async def writes(request: Any, context: Any) -> None:
            try:
                await context.write(b"")
                if method.client_streaming:
                    await context.read()
                await asyncio.sleep(600)
            finally:
                self.ended.append(path)

        behaviour = (
            one if not method.server_streaming else writes if self._way == "writes" else many
        )
        return getattr(grpc, f"{form_of(method)}_rpc_method_handler")(behaviour)


async def begun(channel: grpc.aio.Channel, path: str) -> Any:
    """A call of that method; if it sends a message, after the message."""
    method = METHODS[path]
    call: Any = getattr(channel, form_of(method))(path)
    call = call() if method.client_streaming else call(b"")
    if method.server_streaming:
        await call.read()
    return call


async def ends_of(calls: dict[str, Any], reads: bool) -> dict[str, str]:
    async def end(call: Any) -> str:
        try:
            async with asyncio.timeout(SECONDS):
                while reads and hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
                    pass
                return str((await call.code()).name)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except TimeoutError:
            return "OPEN"

    return dict(zip(calls, await asyncio.gather(*map(end, calls.values())), strict=True))


@pytest.mark.parametrize("way", SENDS)
@pytest.mark.parametrize("role", [Role.AGENT, Role.CLIENT, Role.OPERATOR])
async def test_whoever_is_revoked_has_nothing_open(role: Role, way: str, tmp_path: Path) -> None:
    """As a refusal; and the servicers are over. Calls of another client stay open."""
    identities = Identities(tmp_path)
    server, held = Server("127.0.0.1:0", identities.coordinator()), Held(way)
    server.grpc.add_generic_rpc_handlers((held,))
    address = await server.start()
    paths = [
        path
        for path in METHODS
        if role in ROLES.get(path, ()) and not path.endswith("Health/Check")
    ]
    try:
        async with (
            open_channel(address, identities.of(role, "eve")) as channel,
            open_channel(address, identities.of(role, "bob")) as other,
        ):
            calls = {path: await begun(channel, path) for path in paths}
            staying = await begun(other, "/grpc.health.v1.Health/Watch")
            await asyncio.sleep(0.1)  # those that say nothing have begun
            server.denials.replace([Denial(Principal("site", role, "eve"))])
            ends = await ends_of(calls, reads=way == "sends on and on")
            assert ends == dict.fromkeys(paths, "PERMISSION_DENIED")
            assert sorted(held.ended) == sorted(path for path in paths if "Health" not in path)
            assert not staying.done()
            staying.cancel()
    finally:
        await server.stop(0)


class Beginning(grpc.GenericRpcHandler):
    """Calls `revoke` while gRPC sends the initial metadata of a call, which then sends nothing
    more."""

    def __init__(self, way: str, revoke: Callable[[], None]) -> None:
        self._way = way
        self._revoke = revoke

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def metadata(requests: Any, context: Any) -> AsyncIterator[bytes]:
            asyncio.get_running_loop().call_soon(self._revoke)
            await context.send_initial_metadata(())
            await asyncio.sleep(600)
            yield b""

        async def message(requests: Any, context: Any) -> None:
            asyncio.get_running_loop().call_soon(self._revoke)
            await context.write(b"")
            await asyncio.sleep(600)

        async def later_message(requests: Any, context: Any) -> None:
            await context.write(b"")
            asyncio.get_running_loop().call_soon(self._revoke)
            await context.write(b"")
            await asyncio.sleep(600)

        ways = {"metadata": metadata, "message": message, "later message": later_message}
        return grpc.stream_stream_rpc_method_handler(ways[self._way])


@pytest.mark.parametrize("way", ["metadata", "message", "later message"])
async def test_a_call_that_just_begins_ends_too(way: str, tmp_path: Path) -> None:
    """If a cancellation met gRPC while it sends the metadata, the call would stay open."""
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.coordinator())
    eve = Principal("site", Role.CLIENT, "eve")
    revoked = asyncio.Event()

    def revoke() -> None:
        server.denials.replace([Denial(eve)])
        revoked.set()

    server.grpc.add_generic_rpc_handlers((Beginning(way, revoke),))
    address = await server.start()
    try:
        async with open_channel(address, identities.of(Role.CLIENT, "eve")) as channel:
            call: Any = channel.stream_stream("/edgeshard.proto.v1.InferenceService/Listen")()
            assert await ends_of({way: call}, reads=True) == {way: "PERMISSION_DENIED"}
            assert revoked.is_set()
    finally:
        await server.stop(0)


class Deeds(grpc.GenericRpcHandler):
    """Every method with a stream of messages reads them in a task of its own, and notes the last
    one."""

    def __init__(self) -> None:
        self.read: dict[str, list[bytes]] = {}
        self.held: dict[str, asyncio.Event] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        path = str(details.method)
        method = METHODS.get(path)
        if method is None or not method.client_streaming:
            return None
        read, held = self.read.setdefault(path, []), self.held.setdefault(path, asyncio.Event())

        async def reading(messages: AsyncIterator[bytes]) -> None:
            async for message in messages:
                read.append(message)

        async def serve(messages: AsyncIterator[bytes], context: Any) -> None:
            """End late, as a call does if its caller does not read its messages."""
            reader = asyncio.create_task(reading(messages))
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await held.wait()
                raise
            finally:
                await asyncio.wait({reader}, timeout=SECONDS)

        async def one(messages: AsyncIterator[bytes], context: Any) -> bytes:
            await serve(messages, context)
            return b""

        async def many(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            await serve(messages, context)
            yield b""

        behaviour = many if method.server_streaming else one
        return getattr(grpc, f"{form_of(method)}_rpc_method_handler")(behaviour)


async def test_no_message_of_a_revoked_caller_is_read(tmp_path: Path) -> None:
    """For every method with a stream of messages, also if the call itself ends later."""
    identities = Identities(tmp_path)
    server, deeds = Server("127.0.0.1:0", identities.coordinator()), Deeds()
    server.grpc.add_generic_rpc_handlers((deeds,))
    address = await server.start()
    paths = [path for path, method in METHODS.items() if method.client_streaming]
    assert len(paths) >= 6
    try:
        for path in paths:
            role = next(iter(ROLES[path]))
            async with open_channel(address, identities.of(role, "eve")) as channel:
                call: Any = getattr(channel, form_of(METHODS[path]))(path)()
                await call.write(b"before")
                async with asyncio.timeout(SECONDS):
                    while not deeds.read.get(path):  # noqa: ASYNC110 - nobody tells it
                        await asyncio.sleep(0.01)
                server.denials.replace([Denial(Principal("site", role, "eve"))])
                await call.write(b"after")
                await asyncio.sleep(0.1)  # it arrives
                deeds.held[path].set()
                assert await ends_of({path: call}, reads=False) == {path: "PERMISSION_DENIED"}
            server.denials.replace([])
        assert deeds.read == {path: [b"before"] for path in paths}
    finally:
        await server.stop(0)


async def test_calls_of_a_certificate_that_was_made_since_go_on(tmp_path: Path) -> None:
    """Calls of a restarted process while its old one is still there. A call that ended leaves
    nothing over."""
    identities = Identities(tmp_path)
    server = Server("127.0.0.1:0", identities.coordinator())
    address, watch = await server.start(), "/grpc.health.v1.Health/Watch"
    old = identities.of(Role.AGENT, "a")
    del identities._files[Principal("site", Role.AGENT, "a")]
    identities._directory = tmp_path / "again"
    new = identities.of(Role.AGENT, "a")
    try:
        async with open_channel(address, old) as before, open_channel(address, new) as since:
            calls = {"old": await begun(before, watch), "new": await begun(since, watch)}
            accepted = (serial_of(new.cert.read_bytes()),)
            server.denials.replace([Denial(Principal("site", Role.AGENT, "a"), accepted)])
            assert await ends_of({"old": calls["old"]}, reads=False) == {"old": "PERMISSION_DENIED"}
            assert not calls["new"].done()
            calls["new"].cancel()
        async with asyncio.timeout(20):
            while server._guard._calls._open:  # noqa: ASYNC110 - nobody tells it
                await asyncio.sleep(0.01)
    finally:
        await server.stop(0)
