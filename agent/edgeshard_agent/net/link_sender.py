"""The sending end of a hop: dials the neighbour, resends steps that a broken stream lost, and never
blocks the stage.

It keeps the newest steps for a receiver that lost its stream (`Outbox`), and cuts a step into parts
that fit the link (`PartSize`). It also notices and reports a link that carries nothing although its
connection stands (`link_watch`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import grpc
import structlog

from edgeshard import WIRE_VERSION
from edgeshard.domain.errors import Code, EdgeShardError, InternalError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeName
from edgeshard.domain.nodes.profile import LinkSample
from edgeshard.domain.requests.link import LinkBeacon, LinkHello, LinkSuspected, LinkWelcome
from edgeshard.domain.requests.step import ForwardStep, WireStep
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.clocks import explained
from edgeshard.rpc.link_watch import LinkWatch, next_tick
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.frames import LEAST_PART_BYTES, PART_BYTES, Frame
from edgeshard.wire.link import LinkMessage, exchange_request, link_message_from_wire
from edgeshard.wire.status import from_rpc_error, is_answer
from edgeshard_agent.engine.recording import StepRecorder
from edgeshard_agent.net.prompt_writer import PromptWriter, Write
from edgeshard_agent.net.streams import Reconnecting, end, heed, status_of, until_one_ends

PART_S = 0.25
FIRST_PART_BYTES = 64 << 10
"""While nothing is known: two seconds for a part of it would be 0.26 Mbit/s."""


class PartSize:
    """The size of a step's parts: as much as the link carries in a quarter of a second. Pure; times
    come in as values.

    A part counts as received when all of it is, so on a slow link large parts would look like no
    progress at all.

    `bytes` is the size for the next step; any thread may read it.

    The bytes that arrived between the start of a step and the receiver's report are the least that
    the link carries, because that time includes all waiting. So a step can always enlarge the
    parts. It makes them smaller if it had several: then its time was the link's.
    """

    def __init__(self, window: int) -> None:
        self.bytes = FIRST_PART_BYTES
        self._window = window
        self._sizes: dict[int, int] = {}
        self._under_way: deque[tuple[int, float]] = deque()

    def note(self, step: int, size_bytes: int) -> None:
        """A step with `size_bytes` bytes of tensor will be sent."""
        self._sizes[step] = size_bytes
        self._sizes.pop(step - 2 * self._window, None)

    def restarted(self) -> None:
        """A new stream is open; it is unknown how much of a step the former one carried."""
        self._under_way.clear()

    def sent(self, step: int, now: float) -> None:
        """The step's first bytes are about to be written."""
        if not self._under_way or step > self._under_way[-1][0]:
            self._under_way.append((step, now))

    def received(self, next_step: int, now: float) -> None:
        """The receiver has all steps before `next_step`."""
        while self._under_way and self._under_way[0][0] < next_step:
            step, began_at = self._under_way.popleft()
            size = self._sizes.get(step, 0)
            carried = int(size * PART_S / max(now - began_at, 1e-6))
            if carried > self.bytes or size > self.bytes:
                self.bytes = min(max(carried, LEAST_PART_BYTES), PART_BYTES)


class Outbox:
    """The newest steps that a stage has sent, kept for a receiver that lost its stream.

    Frames by step, in order, never more than a window of steps; pure state.

    `put` appends a step; `take` hands out the frames to write next on the current stream; `rewind`
    is called with the step a (re)connected receiver wants next; `repeat` forwards a kept step once
    more.

    A step can be forgotten without an acknowledgement. The head sends step n only after the result
    of step n - window returned. So every stage has run step n - window when it receives step n.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._frames: dict[int, list[Frame]] = {}
        self._cursor = 0
        self._end = 0
        self._again: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, step: int, frames: list[Frame]) -> None:
        """Keep a step's frames for sending; steps come in order, starting at 0."""
        if step != self._end:
            raise InternalError(f"outbox received step {step}, expected {self._end}")
        self._frames[step] = frames
        self._end += 1
        forgotten = self._end - self._window - 1
        if forgotten in self._frames:
            if self._cursor <= forgotten:
                raise InternalError(f"step {forgotten} leaves the window before it was sent")
            del self._frames[forgotten]

    def take(self) -> tuple[int, list[Frame]] | None:
        """The step to write next with its frames, None when all are written."""
        while self._again:
            step = self._again.popleft()
            if step in self._frames:
                return step, self._frames[step]
        if self._cursor >= self._end:
            return None
        step = self._cursor
        self._cursor += 1
        return step, self._frames[step]

    def rewind(self, next_step: int) -> None:
        """Resend from `next_step`. Raises InternalError when it was forgotten or never existed."""
        first = min(self._frames, default=self._end)
        if not first <= next_step <= self._end:
            raise InternalError(
                f"the receiver requested step {next_step}; steps {first} to {self._end} are "
                "available"
            )
        self._again.clear()
        self._cursor = next_step

    def repeat(self, step: int) -> bool:
        """Forward a step again that was sent already; False when it is not kept any more."""
        if step not in self._frames or step >= self._cursor or step in self._again:
            return False
        self._again.append(step)
        return True


log = structlog.get_logger()

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 0.5
# A neighbour with one of these answers understood us and will never take our steps. Other errors
# may pass; INTERNAL too, which gRPC itself reports for a stream that goes down while it is written.
_FATAL = frozenset({Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED, Code.UNAUTHENTICATED})
_FATAL_REASONS = frozenset({"STALE_EPOCH", "WIRE_VERSION"})

Exchange = grpc.aio.StreamStreamCall[pb.ExchangeRequest, pb.ExchangeResponse]


@dataclass(frozen=True, slots=True)
class Hop:
    """One direction between two stages of a pipeline at an epoch, to `node`, which listens at
    `target`, host:port."""

    deployment: DeploymentName
    epoch: Epoch
    from_stage: int
    to_stage: int
    target: str
    node: NodeName


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream to the next stage and the steps that are to go over it, as a carrier sees them."""

    outbox: Outbox
    wake: asyncio.Event
    """Set when the outbox may hold another step, and when the stream has ended."""
    ended: Callable[[], bool]
    write_step: Callable[[int, list[Frame]], Awaitable[None]]
    write: Callable[[LinkMessage], Awaitable[None]]


class Carrier(Protocol):
    """Carries steps over a link that is not the machine's own. The lab has one
    (`edgeshard_agent.emulation`)."""

    def note(self, step: WireStep) -> None:
        """A step that will be sent."""

    async def carry(self, stream: OpenStream) -> None:
        """Write the steps of the outbox until the stream has ended."""


@dataclass(eq=False)
class LinkSender:
    """Keeps one stream to the next stage open while the epoch lasts.

    `send` puts a step into the outbox, begins to write it unless another is being written, and
    returns at once. If the stream breaks, it is dialled again, the receiver names the step it
    expects next, and sending continues from there. While the link carries nothing, the receiver is
    dialled over new connections: a dead one may be all that is wrong.
    """

    hop: Hop
    window: int
    """Steps that are kept for a receiver which lost its stream."""
    tls: TlsFiles | None
    on_fatal: Callable[[EdgeShardError], None]
    """Called once with a refusal that a retry cannot change."""
    carrier: Carrier | None = None
    """Carries the steps in the lab; without one they are written at once."""
    on_timing: Callable[[LinkSample], None] = lambda sample: None
    """Called with the receiver's timing of a large step."""
    on_suspect: Callable[[LinkSuspected], None] = lambda suspected: None
    """Told when the link carries nothing any more, and when it does again."""
    on_frame: Callable[[Frame], None] = lambda frame: None
    """Called with a frame from the receiver: the head's, of guesses."""
    recorder: StepRecorder | None = field(default=None, init=False)
    """Told when a step's last frame is handed to gRPC; in the lab, when the whole step is at the
    other end."""
    sent_bytes: int = field(default=0, init=False)
    """Payload that was handed to gRPC, including repeated sends."""
    suspicions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.window)
        self._parts = PartSize(self.window)
        self._watch = LinkWatch(0.0)
        self._wake = asyncio.Event()
        """Set for a carrier."""
        self._writer: PromptWriter | None = None
        """Writes to the stream that is open; None while there is none, and with a carrier."""
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self.connected = asyncio.Event()

    @property
    def part_bytes(self) -> int:
        """Bytes that parts of the next step should have; for any thread."""
        return self._parts.bytes

    def start(self) -> None:
        self._watch = LinkWatch(asyncio.get_running_loop().time())
        self._channel = self._connection()
        self._task = asyncio.create_task(
            self._run(), name=f"link-{self.hop.from_stage}-{self.hop.to_stage}"
        )

    async def stop(self) -> None:
        await end(self._task, self._channel)

    def send(self, step: WireStep, frames: list[Frame]) -> None:
        self._outbox.put(step.number, frames)
        hidden = step.hidden if isinstance(step, ForwardStep) else None
        self._parts.note(step.number, 0 if hidden is None else len(hidden.data))
        if self.carrier is not None:
            self.carrier.note(step)
        self._has_news()

    def repeat(self, step: int) -> None:
        """Send a step again, because the stage before sent it again."""
        if self._outbox.repeat(step):
            self._has_news()

    def _has_news(self) -> None:
        self._wake.set()
        if self._writer is not None:
            self._writer.poke()

    async def _run(self) -> None:
        """Send until the receiver refuses for good; over another connection whenever the link is
        suspect."""
        assert self._channel is not None
        try:
            while True:
                await until_one_ends(
                    self._dial(StageServiceStub(self._channel)), self._until_suspect()
                )
                await self._channel.close()
                self._channel = self._connection()
        except EdgeShardError as error:
            self.on_fatal(error)
        except Exception as error:
            # No one awaits this task: if it died, the pipeline would wait for ever.
            log.exception("link_crashed", deployment=self.hop.deployment, hop=self._hop_name)
            self.on_fatal(
                InternalError(f"the link to {self.hop.target} crashed: {type(error).__name__}")
            )

    def _connection(self) -> grpc.aio.Channel:
        return open_channel(self.hop.target, self.tls, "address", node=self.hop.node)

    async def _until_suspect(self) -> None:
        fault = None
        while fault is None:
            await next_tick()
            fault = self._watch.tick(asyncio.get_running_loop().time())
        if fault.is_new:
            self.suspicions += 1
            log.warning(
                "link_suspected", deployment=self.hop.deployment, hop=self._hop_name, why=fault.why
            )
            self._say(recovered=False, why=fault.why)
        else:
            log.info(
                "link_redialled", deployment=self.hop.deployment, hop=self._hop_name, why=fault.why
            )

    def _say(self, *, recovered: bool, why: str) -> None:
        hop = self.hop
        self.on_suspect(
            LinkSuspected(hop.deployment, hop.epoch, hop.from_stage, hop.to_stage, recovered, why)
        )

    @property
    def _hop_name(self) -> str:
        return f"{self.hop.from_stage}->{self.hop.to_stage}"

    async def _dial(self, stub: StageServiceStub) -> None:
        """Open streams, one after the other ends, and write. Raises errors that a retry cannot
        change."""
        loop = asyncio.get_running_loop()
        delay = FIRST_RETRY_S
        reconnecting = Reconnecting()
        while True:
            call: Exchange = stub.Exchange()
            answered = False
            try:
                await self._open(call)
                delay = FIRST_RETRY_S
                reconnecting.came_back(loop.time())
                await self._stream(call)
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error, self.hop.target)
                if typed.code in _FATAL or typed.reason in _FATAL_REASONS:
                    raise await explained(typed, self.hop.target) from None
                answered = is_answer(error)
                reconnecting.failed(loop.time())
                if reconnecting.is_news(typed.reason, "", loop.time()):
                    log.info(
                        "link_retried",
                        hop=self._hop_name,
                        reason=typed.reason,
                        failures=reconnecting.told(),
                    )
            finally:
                self.connected.clear()
                self._watch.closed(answered, loop.time())
                call.cancel()
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_RETRY_S)

    async def _open(self, call: Exchange) -> None:
        hop = self.hop
        which = hop.deployment, hop.epoch, hop.from_stage, hop.to_stage
        await _write(call, LinkHello(*which, dialler_sends=True, wire_version=WIRE_VERSION))
        answer = await call.read()
        if not isinstance(answer, pb.ExchangeResponse):
            await _raise_end(call)
            return
        welcome = link_message_from_wire(answer.message)
        if not isinstance(welcome, LinkWelcome):
            raise InternalError(
                f"{self.hop.target} answered a hello with something else than a welcome"
            )
        self._outbox.rewind(welcome.next_step)
        self._parts.restarted()
        self._watch.welcomed(welcome.next_step, asyncio.get_running_loop().time())
        self.connected.set()

    async def _stream(self, call: Exchange) -> None:
        """Write until the stream ends. The receiver's keepalives and timings are read
        separately."""
        ended = asyncio.create_task(_raise_end(call, self._heard))
        ended.add_done_callback(lambda _: self._wake.set())
        try:
            if self.carrier is not None:
                write_step, write = partial(self._write_step, call), partial(_write, call)
                await self.carrier.carry(
                    OpenStream(self._outbox, self._wake, ended.done, write_step, write)
                )
            else:
                await self._write_until(ended, call)
            ended.result()
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _write_until(self, ended: asyncio.Task[None], call: Exchange) -> None:
        """Write steps as they come until the stream has ended. Raises the error of a write that
        failed."""
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failure.add_done_callback(heed)
        ends: set[asyncio.Future[None]] = {ended, failure}

        def next_write() -> Write | None:
            item = self._outbox.take()
            return None if item is None else self._write_step(call, *item)

        writer = self._writer = PromptWriter(next_write, failure.set_exception)
        try:
            writer.poke()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
        finally:
            self._writer = None
            writer.close()

    def _heard(self, message: LinkMessage | None) -> None:
        if isinstance(message, LinkBeacon):
            now = asyncio.get_running_loop().time()
            self._parts.received(message.next_step, now)
            if self._watch.beacon(message, now):
                log.info("link_recovered", deployment=self.hop.deployment, hop=self._hop_name)
                self._say(recovered=True, why="")
        elif (
            isinstance(message, LinkSample)
            and 0 < message.seconds < float("inf")
            and message.size_bytes
        ):
            self.on_timing(message)
        elif isinstance(message, Frame):
            self.on_frame(message)

    async def _write_step(self, call: Exchange, step: int, frames: list[Frame]) -> None:
        now = asyncio.get_running_loop().time()
        self._watch.sent(step, now)
        self._parts.sent(step, now)
        for frame in frames:
            if self.recorder is not None and frame is frames[-1]:
                # Before the write: after it the receiver may have the step already, which would
                # misalign the clocks.
                self.recorder.sent(step)
            self.sent_bytes += len(frame.payload)
            await _write(call, frame)


async def _write(call: Exchange, message: LinkMessage) -> None:
    try:
        await call.write(exchange_request(message))
    except asyncio.InvalidStateError:
        await _raise_end(call)


async def _raise_end(
    call: Exchange, listener: Callable[[LinkMessage | None], None] = lambda message: None
) -> None:
    """Wait for the end of a call and raise its status; an orderly end counts as a lost stream."""
    while isinstance(answer := await call.read(), pb.ExchangeResponse):
        listener(link_message_from_wire(answer.message))
    if await call.code() is not grpc.StatusCode.OK:
        raise await status_of(call)
