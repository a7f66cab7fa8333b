"""A node follows no coordinator of an older term than one that it has followed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from edgeshard.domain.errors import UnavailableError
from edgeshard.proto.v1 import coordinator_pb2 as pb
from edgeshard.proto.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from edgeshard.rpc.server import Server
from tests.agent.net import test_control_reports
from tests.agent.net.test_control_reports import PROBE, Node


class TermSite(test_control_reports.Site):
    def __init__(self) -> None:
        super().__init__(PROBE)
        self.term = ("home", 5)

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        await super().Register(request, context)
        site, number = self.term
        return pb.RegisterResponse(site=site, term=number)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("127.0.0.1:0", None)
    yield server
    await server.stop(0)


async def test_only_an_older_term_of_the_same_site_is_refused(server: Server) -> None:
    site = TermSite()
    add_CoordinatorServiceServicer_to_server(site, server.grpc)
    node = Node(await server.start())
    try:
        node.running.cancel()
        for term in (("home", 5), ("home", 5), ("home", 6), ("elsewhere", 1)):
            site.term = term
            await node.client._register()
        site.term = ("home", 5)
        with pytest.raises(UnavailableError, match="has term 5") as refused:
            await node.client._register()
        assert (
            refused.value.reason == "STALE_COORDINATOR"
            and "restart this agent" in refused.value.message
        )
        site.term = ("home", 7)
        await node.client._register()
    finally:
        await node.close()
