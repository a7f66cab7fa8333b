"""Probes over real sockets, to the servicer that a hop's frames reach too."""

from __future__ import annotations

import statistics

import pytest
from edgeshard_agent.measuring.probing import probe_link
from edgeshard_agent.net.link_receiver import StageServicer

from edgeshard.domain.control.commands import Peer
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.profiles.links import ProbeSchedule
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from edgeshard.rpc.server import Server

TRIES = 10


def peer_at(address: str) -> Peer:
    return Peer(NodeId("id-b"), NodeName("b"), address)


"""A busy machine delays some probes more than the removal of outliers mends, but not all of
them."""


async def test_a_loopback_link_is_measured() -> None:
    server = Server("127.0.0.1:0", None)
    add_StageServiceServicer_to_server(StageServicer(), server.grpc)
    address = await server.start()
    try:
        for _ in range(TRIES):
            schedule = ProbeSchedule()
            link = await probe_link(peer_at(address), None, schedule)
            assert link.latency_s > 0
            assert schedule.sent_bytes <= schedule.most_bytes
            # The line reports the time of the probes, minus the way back.
            largest = max(schedule.answers)
            took_s = statistics.median(schedule.answers[largest])
            if (
                link.latency_s < 0.05
                and 1e5 < link.bandwidth_bps < 1e12
                and link.transfer_s(largest) == pytest.approx(took_s, rel=0.9)
            ):
                return
    finally:
        await server.stop(0)
    raise AssertionError(f"{link} of {schedule.answers}")


async def test_a_node_that_is_not_there_is_named() -> None:
    server = Server("127.0.0.1:0", None)
    address = await server.start()
    await server.stop(0)
    with pytest.raises(UnavailableError, match=address):
        await probe_link(peer_at(address), None)
