"""The receiving end of a hop: the StageService that neighbours dial, and who gets what comes in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import structlog

from edgeshard import WIRE_VERSION
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    StaleEpochError,
    UnavailableError,
    WireVersionError,
)
from edgeshard.domain.ids import DeploymentName
from edgeshard.domain.link import LinkHello, LinkPadding, LinkWelcome
from edgeshard.domain.step import WireStep
from edgeshard.profiles.links import Arrivals
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceServicer
from edgeshard.wire.frames import Frame, FrameContract, FrameReader
from edgeshard.wire.link import LinkMessage, link_message_from_wire, link_message_to_wire
from edgeshard_agent.net.probes import serve_probe

log = structlog.get_logger()

_ENDED = "LINK_ENDED"

Context = grpc.aio.ServicerContext[pb.ExchangeRequest, pb.ExchangeResponse]
ProbeContext = grpc.aio.ServicerContext[pb.ProbeRequest, pb.ProbeResponse]


class LinkReceiver:
    """One incoming hop of one epoch. It outlives its streams: a step that was received is not asked for again.

    `deliver` gets every step once and in order; `repeat` gets the number of a delivered step that came again.
    """

    def __init__(
        self,
        from_stage: int,
        contract: FrameContract,
        deliver: Callable[[WireStep], None],
        repeat: Callable[[int], None],
    ) -> None:
        self.from_stage = from_stage
        self.contract = contract
        self._reader = FrameReader(contract)
        self._deliver = deliver
        self._repeat = repeat
        self._stream: asyncio.Task[None] | None = None
        self._closed = False

    async def serve(self, context: Context) -> None:
        """Read one stream to its end. A newer stream of the same hop replaces it, with UnavailableError."""
        current = asyncio.current_task()
        if self._stream is not None and not self._stream.done():
            self._stream.cancel()
        self._stream = current
        try:
            await self._read(context, current)
        except asyncio.CancelledError:
            if not self._closed and self._stream is current:
                raise  # gRPC itself: the other side is gone
            # A handler that is only cancelled leaves its call open, and the sender would write in vain.
            why = "the stage is closed" if self._closed else "a newer stream took this one's place"
            raise UnavailableError(f"this link of {self.contract.pipeline} ended: {why}", reason=_ENDED) from None

    async def _read(self, context: Context, current: asyncio.Task[None] | None) -> None:
        self._reader.restart_stream()
        await context.write(_response(LinkWelcome(self._reader.next_step)))
        arrivals = Arrivals()
        while isinstance(message := await context.read(), pb.ExchangeRequest):
            if self._stream is not current:
                return
            frame = link_message_from_wire(message.message)
            if isinstance(frame, LinkPadding):
                continue
            if not isinstance(frame, Frame):
                raise InvalidArgumentError("a link carries frames behind its hello", field="message")
            accepted = self._reader.accept(frame)
            completes = bool(accepted.steps) or accepted.repeated is not None
            sample = arrivals.part(time.monotonic(), accepted.payload_bytes, completes)
            for step in accepted.steps:
                self._deliver(step)
            if accepted.repeated is not None:
                self._repeat(accepted.repeated)
            if sample is not None:
                await context.write(_response(sample))

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.cancel()


def _response(message: LinkMessage) -> pb.ExchangeResponse:
    return pb.ExchangeResponse(message=link_message_to_wire(message))


class StageServicer(StageServiceServicer):
    """Hands each neighbour's stream to the receiver that waits for it."""

    def __init__(self) -> None:
        self._receivers: dict[tuple[DeploymentName, int], LinkReceiver] = {}

    def open(self, deployment: DeploymentName, stage: int, receiver: LinkReceiver) -> None:
        """Receive for this stage from now on; a receiver of a lower epoch is closed."""
        self.close(deployment, stage)
        self._receivers[deployment, stage] = receiver

    def close(self, deployment: DeploymentName, stage: int) -> None:
        former = self._receivers.pop((deployment, stage), None)
        if former is not None:
            former.close()

    async def Exchange(self, request_iterator: object, context: Context) -> None:
        first = await context.read()
        hello = link_message_from_wire(first.message) if isinstance(first, pb.ExchangeRequest) else None
        if not isinstance(hello, LinkHello):
            raise InvalidArgumentError("a link begins with a hello", field="hello")
        receiver = self._find(hello)
        # Apart from the first message: were that cancelled, gRPC would send the metadata again with the status, core
        # would refuse it, and the sender would wait for ever.
        await context.send_initial_metadata(())
        log.info("link_open", deployment=hello.deployment, hop=f"{hello.from_stage}->{hello.to_stage}")
        try:
            await receiver.serve(context)
        except EdgeShardError as error:
            if error.reason != _ENDED:
                log.warning("link_refused", deployment=hello.deployment, reason=error.reason, why=error.message)
            raise

    async def Probe(self, request_iterator: object, context: ProbeContext) -> None:
        await serve_probe(context)

    def _find(self, hello: LinkHello) -> LinkReceiver:
        if hello.wire_version != WIRE_VERSION:
            raise WireVersionError(
                f"this box speaks wire version {WIRE_VERSION}, the neighbour {hello.wire_version}: upgrade the older",
                field="wire_version",
            )
        receiver = self._receivers.get((hello.deployment, hello.to_stage))
        if receiver is None:
            raise NotFoundError(
                f"stage {hello.to_stage} of {hello.deployment!r} is not here",
                field="deployment",
                reason="NO_SUCH_STAGE",
            )
        epoch = receiver.contract.epoch
        if hello.epoch < epoch:
            raise StaleEpochError(f"epoch {hello.epoch} has ended, this stage is at {epoch}", field="epoch")
        if hello.epoch > epoch:
            raise FailedPreconditionError(
                f"this stage is at epoch {epoch}, not yet at {hello.epoch}", field="epoch", reason="NOT_PREPARED"
            )
        if hello.from_stage != receiver.from_stage or not hello.dialler_sends:
            raise InvalidArgumentError(
                f"stage {hello.to_stage} receives from stage {receiver.from_stage}", field="from_stage"
            )
        return receiver
