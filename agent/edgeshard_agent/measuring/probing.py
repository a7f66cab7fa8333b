"""Probing a link through the same server, channel and message sizes as the frames of a hop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

import grpc

from edgeshard.domain.control.commands import Peer
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.nodes.profile import LinkProfile
from edgeshard.profiles.links import ProbeSchedule, link_profile
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub
from edgeshard.rpc.channel import half_close, open_channel
from edgeshard.rpc.clocks import explained
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.frames import PART_BYTES
from edgeshard.wire.status import from_rpc_error

PROBE_TIMEOUT_S = 60.0
_WARM_UPS = 3

Call = grpc.aio.StreamStreamCall[pb.ProbeRequest, pb.ProbeResponse]


Way = Callable[[int], AbstractAsyncContextManager[None]]
"""Surrounds the sending of a number of bytes until they are acknowledged; the lab's version takes
as long as its links.
"""


def at_once(size_bytes: int) -> AbstractAsyncContextManager[None]:
    """The way of a real link, which takes its time by itself."""
    return nullcontext()


async def probe_link(
    peer: Peer, tls: TlsFiles | None, schedule: ProbeSchedule | None = None, way: Way = at_once
) -> LinkProfile:
    """Latency and bandwidth from here to the agent of a node.

    Raises UnavailableError when it cannot be reached or takes longer than PROBE_TIMEOUT_S,
    DeniedError for plaintext beyond loopback.
    """
    schedule = schedule or ProbeSchedule()
    target = peer.address
    channel = open_channel(target, tls, "address", node=peer.name)
    try:
        call: Call = StageServiceStub(channel).Probe()
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            for _ in range(_WARM_UPS):  # the connection, and the first of everything
                await _send(call, 0, target)
            while (size := schedule.next_size()) is not None:
                began = time.perf_counter()
                async with way(size):
                    await _send(call, size, target)
                schedule.answered(size, time.perf_counter() - began)
        await half_close(call)
    except grpc.aio.AioRpcError as error:
        raise await explained(from_rpc_error(error, target), target) from None
    except asyncio.InvalidStateError:
        raise _ended(target) from None
    except TimeoutError:
        raise UnavailableError(
            f"{target} did not answer probes for {PROBE_TIMEOUT_S:.0f} s",
            field="address",
            reason="PROBE_TIMEOUT",
        ) from None
    finally:
        await channel.close()
    return link_profile(schedule.answers)


async def _send(call: Call, size: int, target: str) -> None:
    """One payload, and its acknowledgement."""
    for first in range(0, max(size, 1), PART_BYTES):
        part = bytes(min(PART_BYTES, size - first))
        await call.write(pb.ProbeRequest(payload=part, last=first + PART_BYTES >= size))
    answer = await call.read()
    if not isinstance(answer, pb.ProbeResponse):
        raise _ended(target)
    if answer.received_bytes != size:
        raise UnavailableError(
            f"{target} received {answer.received_bytes} of {size} probe bytes",
            field="address",
            reason="PROBE_DAMAGED",
        )


def _ended(target: str) -> UnavailableError:
    return UnavailableError(f"{target} ended the probe", field="address", reason="PROBE_ENDED")
