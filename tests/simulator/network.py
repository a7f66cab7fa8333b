"""The network between simulated processes: connections, and messages that are bytes and take their
time.

Its events are the ones of real connections. A stream is ordered and loses nothing while it lasts.
It ends at any message, and messages in flight are lost then. Between streams there is no order. A
host that is cut off gets its messages late, or its connections end after the keepalive. A call of
one request may be lost, answered late, or come twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from tests.simulator.loop import Process, VirtualLoop

if TYPE_CHECKING:
    from tests.simulator.calls import Call, SimServer

KEEPALIVE_S = (2.0, 3.6)
"""Until a connection whose peer is cut off counts as lost."""
ROOM = 24
"""Messages that may wait to be sent before a writer waits."""
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, Any], ...]]
Fate = str
"""'' for a message that arrives, 'drop' for one that ends its stream, 'twice' for one that arrives
two times."""


@dataclass(eq=False)
class Network:
    """The listeners, the cut connections between hosts, and the fate of each message (`fate` of its
    kind)."""

    loop: VirtualLoop
    dice: random.Random
    fate: Callable[[str, bool], Fate]
    trace: Callable[[str], None]
    listeners: dict[str, SimServer] = field(default_factory=dict)
    parted: set[tuple[str, str]] = field(default_factory=set)
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds that messages from a host to another take beyond the usual."""
    connections: list[Connection] = field(default_factory=list)
    opened: int = 0

    def latency(self, sender: str, receiver: str) -> float:
        return self.dice.uniform(0.0002, 0.002) + self.slow.get((sender, receiver), 0.0)

    def part(self, a: str, b: str, both: bool) -> None:
        self.parted.add((a, b))
        if both:
            self.parted.add((b, a))
        for connection in self.connections:
            if {connection.client.name, connection.server.name} == {a, b}:
                connection.watch_keepalive()

    def heal(self, a: str, b: str) -> None:
        self.parted -= {(a, b), (b, a)}
        for connection in list(self.connections):
            if {connection.client.name, connection.server.name} == {a, b}:
                connection.flush()

    def is_parted(self, a: str, b: str) -> bool:
        return (a, b) in self.parted or (b, a) in self.parted

    def crashed(self, process: Process, silently: bool) -> None:
        """Its host reports it at once, or it is never heard of again."""
        for address in [a for a, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                after = self.dice.uniform(*KEEPALIVE_S) if silently else self.latency("", "")
                connection.break_off("the peer is gone", after, after)


class Connection:
    """A channel's connection to a server: calls of two processes, which end when it breaks."""

    def __init__(self, network: Network, client: Process, server: SimServer) -> None:
        network.opened += 1
        self.number = network.opened
        self.network = network
        self.client = client
        self.server = server.process
        self.services = server
        self.calls: dict[int, Call] = {}
        self.broken = False
        network.connections.append(self)

    def watch_keepalive(self) -> None:
        network = self.network

        def look() -> None:
            if not self.broken and network.is_parted(self.client.name, self.server.name):
                self.break_off("keepalive", 0.0, network.dice.uniform(0.0, 0.5))

        network.loop.call_global(network.loop.now + network.dice.uniform(*KEEPALIVE_S), look)

    def flush(self) -> None:
        for call in list(self.calls.values()):
            call.up.flush()
            call.down.flush()

    def break_off(self, why: str, client_after: float, server_after: float) -> None:
        """Everything under way is lost; each end notices in its own time."""
        if self.broken:
            return
        self.broken = True
        if self in self.network.connections:
            self.network.connections.remove(self)
        status: Status = (UNAVAILABLE, why, ())
        for call in list(self.calls.values()):
            self.client.call_later(client_after, call.ended, status)
            self.server.call_later(server_after, call.lost)
            call.up.let_go()
            call.down.let_go()


class Pipe:
    """One direction of a call: in order, and nothing is lost while the connection lasts."""

    def __init__(self, connection: Connection, upward: bool, arrive: Callable[[Any], None]) -> None:
        self.connection = connection
        self.sender, self.receiver = (
            (connection.client, connection.server)
            if upward
            else (connection.server, connection.client)
        )
        self._arrive = arrive
        self._last = 0.0
        self._held: list[Any] = []
        self._under_way = 0
        self._room: asyncio.Future[Any] | None = None

    def send(self, item: Any) -> None:
        network = self.connection.network
        if self.connection.broken or self.sender.dead:
            return
        now = network.loop.now
        self._last = max(self._last, now + network.latency(self.sender.name, self.receiver.name))
        self._under_way += 1
        network.loop.call_global(self._last, self._came, item, context=self.receiver.context)

    async def room(self) -> None:
        """Wait while too much is under way."""
        if self._under_way > ROOM and not self.connection.broken:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    def _came(self, item: Any) -> None:
        connection = self.connection
        if connection.broken:
            return
        if self._held or connection.network.is_parted(self.sender.name, self.receiver.name):
            self._held.append(item)
            return
        self._arrived(item)

    def _arrived(self, item: Any) -> None:
        self._under_way -= 1
        self.let_go()
        self._arrive(item)

    def let_go(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def flush(self) -> None:
        """Held messages arrive at once, before messages that are still in flight."""
        loop = self.connection.network.loop
        loop.call_global(loop.now, self._release, context=self.receiver.context)

    def _release(self) -> None:
        """Only here is less held, so that nothing overtakes it that came to a receiver which stood
        still meanwhile."""
        connection = self.connection
        while self._held and not connection.broken:
            if connection.network.is_parted(self.sender.name, self.receiver.name):
                return
            self._arrived(self._held.pop(0))


@dataclass(frozen=True, slots=True)
class Said:
    """A message in flight."""

    data: bytes


def say(connection: Connection, pipe: Pipe, kind: str, said: Said) -> None:
    """Send a message, as its fate wants."""
    network = connection.network
    fate = network.fate(kind, False)
    if fate == "drop":
        network.trace(f"drop {kind} from {pipe.sender.name} to {pipe.receiver.name}")
        connection.break_off(
            "Connection reset by peer", network.latency("", ""), network.latency("", "")
        )
        return
    pipe.send(said)
    if fate == "twice":
        network.trace(f"twice {kind} from {pipe.sender.name} to {pipe.receiver.name}")
        pipe.send(said)


_ONEOFS: dict[type, str | None] = {}


def kind_of(message: Any) -> str:
    """The name of a message for faults: its type, and which of its alternatives it holds."""
    cls = type(message)
    if cls not in _ONEOFS:
        real = [o.name for o in message.DESCRIPTOR.oneofs if not o.name.startswith("_")]
        _ONEOFS[cls] = real[0] if len(real) == 1 else None
    oneof = _ONEOFS[cls]
    name = cls.__name__
    if name in ("ExchangeRequest", "ExchangeResponse"):
        inner = message.message
        which = inner.WhichOneof("message") or "padding"
        return f"Link {which}"
    return name if oneof is None else f"{name} {message.WhichOneof(oneof)}"
