"""The receiving end of a hop: the StageService that neighbours dial, and the receivers of its
frames.

The same server answers the probes of other nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from edgeshard import WIRE_VERSION
from edgeshard.domain import errors
from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.identity import Principal
from edgeshard.domain.ids import DeploymentName, NodeName
from edgeshard.domain.requests.link import LinkBeacon, LinkHello, LinkPadding, LinkWelcome
from edgeshard.domain.requests.step import WireStep
from edgeshard.profiles.links import Arrivals
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceServicer
from edgeshard.rpc.access import caller, check_acts_for_itself
from edgeshard.rpc.link_watch import BEACON_S
from edgeshard.wire.frames import Accepted, Frame, FrameContract, FrameReader
from edgeshard.wire.link import LinkMessage, exchange_response, link_message_from_wire
from edgeshard_agent.engine.recording import StepRecorder
from edgeshard_agent.net.streams import first_request, heed

MOST_PAYLOAD_BYTES = 64 << 20
"""Limit of one stream's payloads together; a node sends 40 MiB at most."""
MOST_STREAMS = 2
"""Limit of one node at a time: it has one, and may not have noticed yet that another is over."""
HELD_BYTES = 512 << 20
BYTES_PER_S = 4 << 20
"""The limit of one node's probes over many streams: this many bytes at once, and this many a
second."""


@dataclass(slots=True)
class _Budget:
    """`left_bytes` were left at `at`, in seconds of a steady clock."""

    left_bytes: float
    at: float


class Probes:
    """Answers probes. The bytes that a node may send are counted over all its streams. In
    plaintext, nodes cannot be distinguished, and each stream has only its own limit. `now` is in
    steady seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._budgets: dict[Principal, _Budget] = {}
        self._open: Counter[Principal | None] = Counter()

    async def serve(self, context: Any) -> None:
        """Acknowledge every payload of one stream, and keep no payload.

        Raises InvalidArgumentError for too long a stream, ResourceExhaustedError for too many or
        too much of one node.
        """
        prober = caller(context)
        if prober is not None and self._open[prober] >= MOST_STREAMS:
            raise ResourceExhaustedError(
                f"{prober} has {MOST_STREAMS} probes open already: end one first",
                field="payload",
                reason="PROBES",
            )
        self._open[prober] += 1
        try:
            await self._answer(context, prober)
        finally:
            self._open[prober] -= 1

    async def _answer(self, context: Any, prober: Principal | None) -> None:
        received = total = 0
        request = await first_request(context, "payload")
        while isinstance(request, pb.ProbeRequest):
            received += len(request.payload)
            total += len(request.payload)
            if total > MOST_PAYLOAD_BYTES:
                raise InvalidArgumentError(
                    f"a probe is at most {MOST_PAYLOAD_BYTES} bytes", field="payload"
                )
            self._charge(prober, len(request.payload))
            if request.last:
                await context.write(pb.ProbeResponse(received_bytes=received))
                received = 0
            request = await context.read()

    def _charge(self, prober: Principal | None, count: int) -> None:
        if prober is None:
            return
        now = self._now()
        budget = self._budgets.setdefault(prober, _Budget(HELD_BYTES, now))
        budget.left_bytes = (
            min(HELD_BYTES, budget.left_bytes + (now - budget.at) * BYTES_PER_S) - count
        )
        budget.at = now
        if budget.left_bytes < 0:
            raise ResourceExhaustedError(
                f"{prober} has sent more than {HELD_BYTES >> 20} MiB of probes: try again",
                field="payload",
                reason="PROBES",
                retry_after_s=MOST_PAYLOAD_BYTES / BYTES_PER_S,
            )


log = structlog.get_logger()

MOST_UNSENT = 16
"""Messages that a stream may owe the other end for another frame to join them."""
_ENDED = "LINK_ENDED"
_CLOSED = "the stage is closed"
_REPLACED = "a newer stream took this one's place"

Context = grpc.aio.ServicerContext[pb.ExchangeRequest, pb.ExchangeResponse]
ProbeContext = grpc.aio.ServicerContext[pb.ProbeRequest, pb.ProbeResponse]


@dataclass(eq=False)
class LinkReceiver:
    """One incoming hop of one epoch. It outlives its streams: a step that was received is not asked
    for again."""

    from_stage: int
    from_node: NodeName
    contract: FrameContract
    deliver: Callable[[WireStep], None]
    """Gets every step once and in order."""
    repeat: Callable[[int], None]
    """Gets the number of a delivered step that came again."""
    received_bytes: int = field(default=0, init=False)
    """Payload of all its streams."""
    recorder: StepRecorder | None = field(default=None, init=False)
    """Told when a step's last frame is there, before it is taken apart."""

    def __post_init__(self) -> None:
        self._reader = FrameReader(self.contract)
        self._stream: _Stream | None = None
        self._closed = False

    def is_for(self, context: Context) -> bool:
        """Whether the caller is the node which the placement names; in plaintext anyone is."""
        try:
            check_acts_for_itself(context, self.from_node, "from_stage")
        except errors.DeniedError:
            return False
        return True

    async def serve(self, context: Context) -> None:
        """Take one stream to its end. A newer stream of the same hop replaces it, with
        UnavailableError.

        Raises DeniedError for a caller that is not the node which the placement names.
        """
        check_acts_for_itself(context, self.from_node, "from_stage")
        if self._closed:
            raise self._ended(_CLOSED)
        if self._stream is not None:
            self._stream.end(_REPLACED)
        stream = self._stream = _Stream(context, self._take, lambda: self._reader.next_step)
        self._reader.restart_stream()
        why = await stream.run(LinkWelcome(self._reader.next_step))
        if why is not None:
            raise self._ended(why)

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.end(_CLOSED)

    def tell(self, frame: Frame) -> None:
        """Send the other end a frame over the current stream; drop the frame if there is no stream
        or if it lags."""
        if self._stream is not None:
            self._stream.tell(frame)

    def _take(self, frame: Frame) -> Accepted:
        recorder = self.recorder
        came_s = recorder.now() if recorder is not None else 0.0
        accepted = self._reader.accept(frame)
        self.received_bytes += accepted.payload_bytes
        for step in accepted.steps:
            if recorder is not None:
                recorder.came(step.number, came_s)
            self.deliver(step)
        if accepted.repeated is not None:
            self.repeat(accepted.repeated)
        return accepted

    def _ended(self, why: str) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"this link of {self.contract.pipeline} ended: {why}", reason=_ENDED
        )


class _Stream:
    """One stream of a hop. One task reads, one writes, and neither waits for the other.

    No task of it is cancelled: gRPC keeps an operation whose task is gone, refuses the next, and
    the call stays open. `end` makes the writing task stop after its current write; the reading task
    ends with the call.
    """

    def __init__(
        self, context: Context, take: Callable[[Frame], Accepted], next_step: Callable[[], int]
    ) -> None:
        self._context = context
        self._take = take
        self._next_step = next_step
        self._arrivals = Arrivals()
        self._kept: tuple[Frame, Accepted] | None = None
        """The newest frame and its step. If their memory were freed before the next frame arrives,
        the system would reclaim it and map it again page by page: 2 ms for a step of 2 MiB."""
        self._received_bytes = 0
        self._unsent: deque[LinkMessage] = deque()
        self._beacon_at = 0.0
        self._wake = asyncio.Event()
        self._over = False
        self._why: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, why: str) -> None:
        self._stop()
        if not self._why.done():
            self._why.set_result(why)

    def tell(self, frame: Frame) -> None:
        if not self._over and len(self._unsent) < MOST_UNSENT:
            self._unsent.append(frame)
            self._wake.set()

    def _stop(self) -> None:
        self._over = True
        self._wake.set()

    async def run(self, welcome: LinkWelcome) -> str | None:
        """Serve until the caller has sent everything, or until `end`: then return the reason.
        Raises the error of a faulty frame.
        """
        self._unsent.append(welcome)
        reading, writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        for task in (reading, writing):
            task.add_done_callback(heed)
        ends: set[asyncio.Future[Any]] = {reading, writing, self._why}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when gRPC itself cancels: the caller is gone
            self._stop()
        # No status may be sent during a write.
        await asyncio.wait({writing})
        writing.result()
        if not self._why.done():
            await asyncio.wait({reading})
        if reading.done():
            reading.result()
        return self._why.result() if self._why.done() else None

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # the call is over
            while (
                isinstance(message := await self._context.read(), pb.ExchangeRequest)
                and not self._over
            ):
                self._came(link_message_from_wire(message.message))

    def _came(self, message: LinkMessage | None) -> None:
        if isinstance(message, LinkPadding):
            self._received_bytes += message.size_bytes
            return
        if not isinstance(message, Frame):
            raise errors.InvalidArgumentError(
                "a link carries frames after its hello", field="message"
            )
        accepted = self._take(message)
        self._kept = (message, accepted)
        self._received_bytes += accepted.payload_bytes
        completes = bool(accepted.steps) or accepted.repeated is not None
        sample = self._arrivals.part(time.monotonic(), accepted.payload_bytes, completes)
        if sample is not None:
            self._unsent.append(sample)
        if completes and accepted.parts > 1:
            # At once: the sender learns from it how long the parts took.
            self._beacon_at = 0.0
            self._wake.set()

    async def _write(self) -> None:
        """The welcome, timings, and keepalives; each as soon as it is there or due."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(grpc.aio.BaseError):  # the call is over
            while not self._over:
                if self._unsent:
                    await self._context.write(exchange_response(self._unsent.popleft()))
                elif self._beacon_at <= loop.time():
                    self._beacon_at = loop.time() + BEACON_S
                    await self._context.write(
                        exchange_response(LinkBeacon(self._received_bytes, self._next_step()))
                    )
                else:
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(self._beacon_at):
                            await self._wake.wait()


class StageServicer(StageServiceServicer):
    """Hands each neighbour's stream to the receiver that waits for it."""

    def __init__(self) -> None:
        self._receivers: dict[tuple[DeploymentName, int], LinkReceiver] = {}
        self._probes = Probes(time.monotonic)

    def open(self, deployment: DeploymentName, stage: int, receiver: LinkReceiver) -> None:
        """Receive for this stage from now on; a receiver of a lower epoch is closed."""
        self.close(deployment, stage)
        self._receivers[deployment, stage] = receiver

    def close(self, deployment: DeploymentName, stage: int) -> None:
        former = self._receivers.pop((deployment, stage), None)
        if former is not None:
            former.close()

    async def Exchange(self, request_iterator: object, context: Context) -> None:
        first = await first_request(context, "hello")
        hello = (
            link_message_from_wire(first.message) if isinstance(first, pb.ExchangeRequest) else None
        )
        if not isinstance(hello, LinkHello):
            raise errors.InvalidArgumentError("a link begins with a hello", field="hello")
        receiver = self._find(hello, context)
        # Apart from the first message: were that cancelled, gRPC would send the metadata again with
        # the status, core would refuse it, and the sender would wait for ever.
        await context.send_initial_metadata(())
        log.info(
            "link_opened", deployment=hello.deployment, hop=f"{hello.from_stage}->{hello.to_stage}"
        )
        try:
            await receiver.serve(context)
        except errors.EdgeShardError as error:
            if error.reason != _ENDED:
                log.warning(
                    "link_refused",
                    deployment=hello.deployment,
                    reason=error.reason,
                    why=error.message,
                )
            raise

    async def Probe(self, request_iterator: object, context: ProbeContext) -> None:
        await self._probes.serve(context)

    def _find(self, hello: LinkHello, context: Context) -> LinkReceiver:
        """The receiver of a hop. Another node than the one before it gets the answer of a missing
        stage, so that it learns no epoch."""
        if hello.wire_version != WIRE_VERSION:
            raise errors.WireVersionError(
                f"this node speaks wire version {WIRE_VERSION}, the neighbour "
                f"{hello.wire_version}: upgrade the older",
                field="wire_version",
            )
        receiver = self._receivers.get((hello.deployment, hello.to_stage))
        if receiver is None or not receiver.is_for(context):
            raise errors.NotFoundError(
                f"stage {hello.to_stage} of {hello.deployment!r} is not here",
                field="deployment",
                reason="NO_SUCH_STAGE",
            )
        epoch = receiver.contract.epoch
        if hello.epoch < epoch:
            raise errors.StaleEpochError(
                f"epoch {hello.epoch} has ended, this stage is at {epoch}", field="epoch"
            )
        if hello.epoch > epoch:
            raise errors.FailedPreconditionError(
                f"this stage is at epoch {epoch}, not yet at {hello.epoch}",
                field="epoch",
                reason="NOT_PREPARED",
            )
        if hello.from_stage != receiver.from_stage or not hello.dialler_sends:
            raise errors.InvalidArgumentError(
                f"stage {hello.to_stage} receives from stage {receiver.from_stage}",
                field="from_stage",
            )
        return receiver
