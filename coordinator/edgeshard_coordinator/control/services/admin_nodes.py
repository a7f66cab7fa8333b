"""Calls on nodes, the site, packed units and measuring."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from edgeshard.architectures import check_quantisation, parse_config
from edgeshard.domain.control.commands import MeasureCompute
from edgeshard.domain.control.site import MeasureRequest
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import ModelName
from edgeshard.domain.nodes.profile import Effort
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.site import (
    drop_call_from_wire,
    label_call_from_wire,
    measure_request_from_wire,
    node_details_to_wire,
    node_progress_to_wire,
    node_to_wire,
    packed_unit_to_wire,
    site_to_wire,
)
from edgeshard_coordinator.control.persistence.operations import (
    answered,
    check_same,
    fingerprint_of,
)
from edgeshard_coordinator.control.runtime.measure_calls import MeasureCall
from edgeshard_coordinator.control.services.admin_calls import AdminCalls
from edgeshard_coordinator.control.services.site_views import node_details, node_views, site_details
from edgeshard_coordinator.core.profiling.measuring import chosen_nodes
from edgeshard_coordinator.core.values.events import MeasureRequested, NodeLabelled
from edgeshard_coordinator.core.values.state import ServedOperation


class NodeCalls(AdminCalls):
    """Calls on nodes, the site, packed units and measuring."""

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        state, now = self._loop.state, self._loop.now()
        return pb.ListNodesResponse(
            nodes=[
                node_to_wire(self._conditions.with_condition(node))
                for node in node_views(state, now)
            ]
        )

    async def GetNode(self, request: pb.GetNodeRequest, context: Any) -> pb.GetNodeResponse:
        state = self._loop.state
        details = node_details(
            state, state.node_named(request.node), self._models, self._loop.now()
        )
        return node_details_to_wire(
            replace(details, node=self._conditions.with_condition(details.node))
        )

    async def LabelNode(self, request: pb.LabelNodeRequest, context: Any) -> pb.LabelNodeResponse:
        """On disk before it holds, so that a disk that refuses changes nothing."""
        call = label_call_from_wire(request)
        node = self._loop.state.node_named(call.node)
        if node.joined:
            await answered(self._store.save_node(node.relabelled(call.labels, call.removed)))
        await self._loop.ask(
            NodeLabelled(node.node_id, call.labels, call.removed, self._loop.now())
        )
        details = node_details(
            self._loop.state,
            self._loop.state.node_named(node.node_id),
            self._models,
            self._loop.now(),
        )
        return pb.LabelNodeResponse(
            node=node_to_wire(self._conditions.with_condition(details.node))
        )

    async def GetSite(self, request: pb.GetSiteRequest, context: Any) -> pb.GetSiteResponse:
        site = site_details(self._loop.state, self._models, request.model, self._loop.now())
        whole = replace(
            site,
            nodes=tuple(map(self._conditions.with_condition, site.nodes)),
            traffic=self._traffic.of_model(ModelName(request.model)),
            coordinator=self._conditions.own(),
        )
        return site_to_wire(whole)

    async def ListPacked(
        self, request: pb.ListPackedRequest, context: Any
    ) -> pb.ListPackedResponse:
        units = await self._questions.packed.list(request.node)
        return pb.ListPackedResponse(units=[packed_unit_to_wire(unit) for unit in units])

    async def DropPacked(
        self, request: pb.DropPackedRequest, context: Any
    ) -> pb.DropPackedResponse:
        call = drop_call_from_wire(request)

        async def work(operation: ServedOperation) -> bytes:
            units = await self._questions.packed.drop(call.node, call.ids)
            response = pb.DropPackedResponse(units=[packed_unit_to_wire(unit) for unit in units])
            done = replace(operation, outcome=response.SerializeToString())
            await answered(self._store.save_operation(done))
            return done.outcome

        outcome = await self.operations.once(call.operation_id, request, work)
        return pb.DropPackedResponse.FromString(outcome)

    async def Profile(
        self, request: pb.ProfileRequest, context: Any
    ) -> AsyncIterator[pb.ProfileResponse]:
        """Measure nodes. A caller that goes away changes nothing: nodes measure on, and their
        reports are kept."""
        call = await self._measure(measure_request_from_wire(request), fingerprint_of(request))
        async with aclosing(self._questions.calls.follow(call)) as news:
            async for progress in news:
                yield node_progress_to_wire(progress)

    async def _measure(self, request: MeasureRequest, fingerprint: str) -> MeasureCall:
        """The call with this operation id, begun unless it is there already."""
        operation_id = request.operation_id
        former_call = self._questions.calls.find(operation_id)
        if former_call is not None:
            check_same(operation_id, former_call.fingerprint, fingerprint)
            return former_call
        compute = None
        if request.model:
            compute = self._measure_compute(request)
        nodes = chosen_nodes(self._loop.state, request.nodes)
        uid = uuid.uuid4().hex
        call = self._questions.calls.begin(operation_id, uid, fingerprint, nodes)
        # A caller who requests only links wants them measured, not remembered.
        every_link = request.again or compute is None
        try:
            await self._loop.ask(
                MeasureRequested(uid, tuple(nodes), compute, every_link, self._loop.now())
            )
        except EdgeShardError:
            self._questions.calls.forget(operation_id)
            raise
        return call

    def _measure_compute(self, request: MeasureRequest) -> MeasureCompute:
        manifest, _ = self._models.get(request.model)
        if request.quantisation is not None:
            check_quantisation(parse_config(manifest.config), request.quantisation)
        effort = Effort.QUICK if request.quick else Effort.FULL
        return MeasureCompute(
            manifest.config, request.dtype, effort, request.again, request.quantisation
        )
