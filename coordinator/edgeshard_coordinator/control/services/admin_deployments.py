"""Plans and deployments, and the nodes that are measured before something is placed on them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from edgeshard.architectures import parse_config
from edgeshard.domain.deployments.deployment import (
    EVERY_NODE,
    Deployment,
    DeploymentPhase,
    DeploymentSpec,
)
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.traffic import Outlook, Traffic
from edgeshard.domain.errors import AlreadyExistsError, EdgeShardError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, ModelName, NodeId
from edgeshard.domain.models.model import ModelManifest
from edgeshard.planning.report.speculation import with_expected
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire import site as wire
from edgeshard_coordinator.control.persistence.operations import answered, check_same
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.services.admin_calls import AdminCalls
from edgeshard_coordinator.control.services.admin_replans import on_newest_state
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.placement.replicated import check_joins
from edgeshard_coordinator.core.placement.source_choice import with_source
from edgeshard_coordinator.core.profiling.missing_profiles import (
    first_jobs,
    still_measuring,
    usable,
)
from edgeshard_coordinator.core.values.events import (
    DeleteRequested,
    DeployRequested,
    MeasureRequested,
)
from edgeshard_coordinator.core.values.state import (
    NO_EPOCH,
    DeploymentRecord,
    ServedOperation,
    State,
    deployment_view,
)

log = structlog.get_logger()


def lacks_measurements(
    state: State, spec: DeploymentSpec, config: Mapping[str, Any], active_requests: int
) -> bool:
    """Whether `measure_first` has anything to request, or to wait for."""
    return bool(
        still_measuring(state, usable(state, spec))
        or first_jobs(state, spec, config, active_requests)
    )


async def measure_first(
    loop: StateLoop,
    spec: DeploymentSpec,
    config: Mapping[str, Any],
    limit_s: float,
    active_requests: int,
) -> None:
    """Have nodes that a deployment may use measure the missing figures of a plan. Returns when that
    is over, or after `limit_s`. While requests are active, nodes that serve are left out.

    Measurements that already run are waited for. If they were for something else, their nodes are
    called afterwards. Nodes continue after `limit_s`, and one that gets a stage ends its
    measurement. A measurement that fails is only the node's failure: its log has the reason, it is
    not repeated, and the placement continues without it.
    """
    usable_nodes = usable(loop.state, spec)
    queried_nodes: set[NodeId] = set()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                at_it = still_measuring(loop.state, usable_nodes)
                for compute, node_ids in first_jobs(loop.state, spec, config, active_requests):
                    new = tuple(node_id for node_id in node_ids if node_id not in queried_nodes)
                    queried_nodes.update(new)
                    if new:
                        with suppress(EdgeShardError):  # a node went away meanwhile
                            await loop.ask(
                                MeasureRequested(uuid.uuid4().hex, new, compute, False, loop.now())
                            )
                await loop.until(lambda state: not still_measuring(state, usable_nodes))
                if at_it <= queried_nodes:
                    return
    except TimeoutError:
        late = sorted(
            loop.state.nodes[node_id].name for node_id in still_measuring(loop.state, usable_nodes)
        )
        log.info("placed_without_measurements", deployment=spec.name, nodes=late)


class DeploymentAdminCalls(AdminCalls):
    """Plans and deployments."""

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        spec = wire.spec_from_wire(request.spec)
        manifest, digest = self._models.get(spec.model)
        spec = self._as_stored(spec, manifest)
        spec, draft = await self._drafts.of(spec, manifest)
        placements = await self._planner.place_replicas(
            self._loop.state, spec, manifest, digest, draft
        )
        first, *further = [
            wire.placement_to_wire(self._told(one, spec.model)) for one in placements
        ]
        return pb.PlanResponse(placement=first, further=further)

    async def Deploy(self, request: pb.DeployRequest, context: Any) -> pb.DeployResponse:
        call = wire.deploy_call_from_wire(request)
        spec = call.spec

        async def deploy(operation: ServedOperation) -> ServedOperation:
            if call.measure_s:
                await self._measured_first(spec, call.measure_s)
            async with self._model_lock:
                return await on_newest_state(lambda: self._deploy(spec, operation))

        return pb.DeployResponse.FromString(
            await self._once(request, DeploymentName(spec.name), deploy)
        )

    async def ListDeployments(
        self, request: pb.ListDeploymentsRequest, context: Any
    ) -> pb.ListDeploymentsResponse:
        records = sorted(self._loop.state.deployments.values(), key=lambda record: record.name)
        return pb.ListDeploymentsResponse(
            deployments=[wire.deployment_to_wire(self._view(record)) for record in records]
        )

    async def GetDeployment(
        self, request: pb.GetDeploymentRequest, context: Any
    ) -> pb.GetDeploymentResponse:
        record = self._loop.state.deployment_named(request.name)
        view = self._view(record)
        if request.outlook:
            view = replace(view, outlook=await self._outlook(record, view.traffic))
        return pb.GetDeploymentResponse(deployment=wire.deployment_to_wire(view))

    async def DeleteDeployment(
        self, request: pb.DeleteDeploymentRequest, context: Any
    ) -> pb.DeleteDeploymentResponse:
        """Returns once the deletion is on disk. The deployment is listed as deleting until its
        nodes have released it, with `force` only until the disk has forgotten it. The name of
        replicas is that of all of them."""
        call = wire.delete_call_from_wire(request)
        name = DeploymentName(call.name)

        async def delete(operation: ServedOperation) -> ServedOperation:
            await self._loop.ask(DeleteRequested(name, operation, self._loop.now(), call.force))
            return operation

        return pb.DeleteDeploymentResponse.FromString(await self._once(request, name, delete))

    async def Replan(self, request: pb.ReplanRequest, context: Any) -> pb.ReplanResponse:
        """Returns once the move is on disk; the deployment is loading then. A dry run plans only if
        something is new."""
        call = wire.replan_call_from_wire(request)
        name = DeploymentName(call.name)
        if call.dry_run:
            return wire.replan_to_wire(await self._replans.look(name, force=call.force))

        async def move(operation: ServedOperation) -> ServedOperation:
            return await self._replans.move(name, operation, force=call.force)

        return pb.ReplanResponse.FromString(await self._once(request, name, move))

    async def _once(
        self,
        request: Any,
        name: DeploymentName,
        act: Callable[[ServedOperation], Awaitable[ServedOperation]],
    ) -> bytes:
        """The outcome of a call on a deployment, once the disk has it. `act` returns the operation
        with its outcome; a call that is repeated before the disk has answered is not done again."""

        async def work(operation: ServedOperation) -> bytes:
            served_operation = self._pending(name, operation) or await act(operation)
            await self._saved(name, served_operation)
            return served_operation.outcome

        return await self.operations.once(request.operation_id, request, work)

    async def _measured_first(self, spec: DeploymentSpec, limit_s: float) -> None:
        """Have nodes measured that the deployment may use. First this raises every error that
        deploying would raise anyway, before a caller waits. If there is nothing to measure,
        deploying raises it itself."""
        state, active_requests = self._loop.state, self._front.all_active_requests()
        manifest, digest = self._models.get(spec.model)
        self._check_new(spec, digest)
        spec = self._as_stored(spec, manifest)
        spec, draft = await self._drafts.of(spec, manifest)
        if lacks_measurements(state, spec, manifest.config, active_requests):
            await self._planner.place_replicas(state, spec, manifest, digest, draft)
            await measure_first(self._loop, spec, manifest.config, limit_s, active_requests)

    async def _deploy(self, spec: DeploymentSpec, operation: ServedOperation) -> ServedOperation:
        """Place on the newest state, then enter the deployment; the operation done.

        Raises AbortedError if something changed meanwhile.
        """
        state = self._loop.state
        manifest, digest = self._models.get(spec.model)
        self._check_new(spec, digest)
        spec = self._as_stored(spec, manifest)
        spec, draft = await self._drafts.of(spec, manifest)
        placements = await self._planner.place_replicas(state, spec, manifest, digest, draft)
        specs = (spec,) if spec.replica else spec.numbered(len(placements))
        records = [
            new_record(state, _blank_record(with_source(one, placement), digest, placement))
            for one, placement in zip(specs, placements, strict=True)
        ]
        view = deployment_view(state, records[0])
        view = replace(view, placement=self._told(view.placement, spec.model))
        response = pb.DeployResponse(deployment=wire.deployment_to_wire(view))
        done = replace(operation, outcome=response.SerializeToString())
        # The last one carries the call: the state receives their saves in this order.
        *others, record = records
        await self._loop.ask(
            DeployRequested(
                record, state.version, done, self._loop.now(), manifest.config, tuple(others)
            )
        )
        for record in records:
            self._replans.placed(state, record)
        return done

    def _check_new(self, spec: DeploymentSpec, digest: Digest) -> None:
        """Raise AlreadyExistsError for a name that is there. Of a spec that is one of several
        replicas the others must be there, and like it."""
        state = self._loop.state
        if state.replicas_of(DeploymentName(spec.name)):
            raise AlreadyExistsError(
                f"name: there is a deployment {spec.name} already; delete it first or choose "
                "another name",
                field="name",
            )
        if spec.replica:
            check_joins(spec, digest, state.siblings_of(spec))

    def _as_stored(self, spec: DeploymentSpec, manifest: ModelManifest) -> DeploymentSpec:
        """Weights that are stored as small integers stay so on nodes that compute with them, which
        are CPUs."""
        nodes = self._loop.state.nodes.values()
        cpus = [node.name for node in nodes if node.facts.kind == "cpu"]
        which = (EVERY_NODE,) if len(cpus) == len(nodes) else cpus
        return spec.as_stored(parse_config(manifest.config).stored_as, which)

    async def _outlook(self, record: DeploymentRecord, traffic: Traffic) -> Outlook:
        outlook = await self._planner.outlook(record, traffic) if traffic.requests else Outlook()
        if record.phase is not DeploymentPhase.READY:
            return outlook
        return replace(outlook, losses=await self._planner.losses(record, traffic))

    def _view(self, record: DeploymentRecord) -> Deployment:
        view = deployment_view(self._loop.state, record, self._front.active_requests(record.name))
        traffic = self._traffic.of(record.served_name, record.model)
        return replace(view, placement=self._told(view.placement, record.model), traffic=traffic)

    def _told(self, placement: Placement, model: str) -> Placement:
        """A placement as operators see it: with the worth of its draft tokens, from the model's
        requests."""
        return with_expected(placement, self._traffic.guesses_of_model(ModelName(model)))

    def _pending(self, name: DeploymentName, operation: ServedOperation) -> ServedOperation | None:
        """The same call made before, which the disk has not answered yet."""
        pending_operation = self._loop.state.pending_operation(name, operation.operation_id)
        if pending_operation is not None:
            check_same(operation.operation_id, pending_operation.fingerprint, operation.fingerprint)
        return pending_operation

    async def _saved(self, name: DeploymentName, operation: ServedOperation) -> None:
        """Wait until the call is on disk. Raises the error with which the disk refused it; the call
        has changed nothing then."""
        operation_id = operation.operation_id
        await answered(
            self._loop.until(lambda state: state.pending_operation(name, operation_id) is None)
        )
        refused = self._loop.state.refusal(operation_id)
        if refused is not None:
            raise type(refused)(
                f"deployment {name} is as it was: {refused.message}",
                field=refused.field,
                reason=refused.reason,
            )


def _blank_record(spec: DeploymentSpec, digest: Digest, placement: Placement) -> DeploymentRecord:
    return DeploymentRecord(
        uid=uuid.uuid4().hex,
        spec=spec,
        manifest_digest=digest,
        placement=placement,
        epoch=Epoch(NO_EPOCH),
    )
