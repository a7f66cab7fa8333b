"""What an operator calls through edgectl."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from edgeshard.architectures import check_quantisation, parse_config
from edgeshard.domain.audit import MOST_ENTRIES
from edgeshard.domain.control.commands import MeasureCompute
from edgeshard.domain.control.site import MeasureRequest
from edgeshard.domain.control.site_event import MOST_EVENTS
from edgeshard.domain.deployments.deployment import EVERY_NODE, Deployment, DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.traffic import Outlook, Traffic
from edgeshard.domain.errors import (
    AbortedError,
    AlreadyExistsError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, ModelName, OperationId
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.nodes.profile import config_hash
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.proto.v1 import admin_pb2_grpc
from edgeshard.wire.audit import audit_checks_to_wire, audit_entry_to_wire
from edgeshard.wire.common import node_to_wire
from edgeshard.wire.debug import dump_messages
from edgeshard.wire.deployment import (
    deployment_to_wire,
    placement_to_wire,
    replan_call_from_wire,
    replan_to_wire,
    spec_from_wire,
)
from edgeshard.wire.packed import drop_call_from_wire, packed_unit_to_wire
from edgeshard.wire.site import (
    measure_request_from_wire,
    node_details_to_wire,
    node_progress_to_wire,
    site_to_wire,
    stored_model_to_wire,
)
from edgeshard.wire.site_event import site_event_to_wire
from edgeshard.wire.trace import trace_to_wire
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.persistence.operations import Operations, answered, check_same, fingerprint_of
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.requests.models import Models, stored_model
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.runtime.calls import MeasureCall, MeasureCalls
from edgeshard_coordinator.control.runtime.conditions import Conditions
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.control.services.dumping import Dumps
from edgeshard_coordinator.control.services.packed import Packed
from edgeshard_coordinator.control.services.replan import PLACING_ATTEMPTS, Replans
from edgeshard_coordinator.control.services.site_events import SiteEvents
from edgeshard_coordinator.control.services.site_views import node_details, node_views, site_details
from edgeshard_coordinator.control.services.tracing import Traces
from edgeshard_coordinator.core.deployments.deployments import new_record
from edgeshard_coordinator.core.placement.sources import with_source
from edgeshard_coordinator.core.profiling.measuring import chosen_nodes
from edgeshard_coordinator.core.values.events import DeleteRequested, DeployRequested, MeasureRequested, ModelDeleted
from edgeshard_coordinator.core.values.state import (
    NO_EPOCH,
    DeploymentRecord,
    ServedOperation,
    deployment_view,
)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(  # noqa: PLR0913 - an operator asks for everything
        self,
        loop: StateLoop,
        front: RequestFront,
        calls: MeasureCalls,
        traces: Traces,
        dumps: Dumps,
        packed: Packed,
        models: Models,
        planner: Planner,
        store: StateStore,
        audit: AuditLog,
        events: SiteEvents,
        conditions: Conditions,
    ) -> None:
        self._loop = loop
        self._front = front
        self._traffic = front.traffic
        self._calls = calls
        self._traces = traces
        self._dumps = dumps
        self._packed = packed
        self._models = models
        self._planner = planner
        self._store = store
        self._audit = audit
        self._events = events
        self._conditions = conditions
        self._replans = Replans(loop, planner, store)
        self.operations = Operations(store)
        # Between looking a model up and deploying it, it must not be deleted.
        self._model_lock = asyncio.Lock()

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        state, now = self._loop.state, self._loop.now()
        return pb.ListNodesResponse(
            nodes=[node_to_wire(self._conditions.with_condition(node)) for node in node_views(state, now)]
        )

    async def GetNode(self, request: pb.GetNodeRequest, context: Any) -> pb.GetNodeResponse:
        state = self._loop.state
        node = state.find_node(request.node)
        if node is None:
            raise NotFoundError(f"node: there is no node {request.node[:80]!r}", field="node")
        details = node_details(state, node, self._models, self._loop.now())
        return node_details_to_wire(replace(details, node=self._conditions.with_condition(details.node)))

    async def ListPacked(self, request: pb.ListPackedRequest, context: Any) -> pb.ListPackedResponse:
        units = await self._packed.list(request.node)
        return pb.ListPackedResponse(units=[packed_unit_to_wire(unit) for unit in units])

    async def DropPacked(self, request: pb.DropPackedRequest, context: Any) -> pb.DropPackedResponse:
        call = drop_call_from_wire(request)

        async def work(operation: ServedOperation) -> bytes:
            units = await self._packed.drop(call.node, call.ids)
            response = pb.DropPackedResponse(units=[packed_unit_to_wire(unit) for unit in units])
            done = replace(operation, outcome=response.SerializeToString())
            await answered(self._store.save_operation(done))
            return done.outcome

        outcome = await self.operations.once(call.operation_id, request, work)
        return pb.DropPackedResponse.FromString(outcome)

    async def GetSite(self, request: pb.GetSiteRequest, context: Any) -> pb.GetSiteResponse:
        site = site_details(self._loop.state, self._models, request.model, self._loop.now())
        whole = replace(
            site,
            nodes=tuple(map(self._conditions.with_condition, site.nodes)),
            traffic=self._traffic.of_model(ModelName(request.model)),
            coordinator=self._conditions.own(),
        )
        return site_to_wire(whole)

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> AsyncIterator[pb.ProfileResponse]:
        """A caller that goes away changes nothing: nodes measure on, and what they report is kept."""
        call = await self._measure(measure_request_from_wire(request), fingerprint_of(request))
        async with aclosing(self._calls.follow(call)) as news:
            async for progress in news:
                yield node_progress_to_wire(progress)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        stored = [stored_model(manifest, digest) for manifest, digest in self._models.list()]
        return pb.ListModelsResponse(models=[stored_model_to_wire(model) for model in stored])

    async def DeleteModel(self, request: pb.DeleteModelRequest, context: Any) -> pb.DeleteModelResponse:
        async def work(operation: ServedOperation) -> bytes:
            # Models are files, and not in one transaction with operations: a repeat that finds the model gone must
            # know that the first call began, and was not answered before the coordinator ended.
            begun = replace(operation, operation_id=OperationId(f"{operation.operation_id}/begun"))
            repeated = await answered(self._store.find_operation(begun.operation_id)) is not None
            async with self._model_lock:
                try:
                    shape = config_hash(self._check_unused(request.name).config)
                    if not repeated:
                        await answered(self._store.save_operation(begun))
                    await asyncio.to_thread(self._models.delete, request.name)
                    if all(config_hash(manifest.config) != shape for manifest, _ in self._models.list()):
                        self._loop.post(ModelDeleted(shape, self._loop.now()))
                except NotFoundError:
                    if not repeated:
                        raise
            await answered(self._store.save_operation(operation))
            return operation.outcome

        outcome = await self.operations.once(request.operation_id, request, work)
        return pb.DeleteModelResponse.FromString(outcome)

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        spec = spec_from_wire(request.spec)
        manifest, digest = self._models.get(spec.model)
        spec = self._as_stored(spec, manifest)
        placement = await self._planner.place(self._loop.state, spec, manifest, digest)
        return pb.PlanResponse(placement=placement_to_wire(placement))

    async def Deploy(self, request: pb.DeployRequest, context: Any) -> pb.DeployResponse:
        spec = spec_from_wire(request.spec)

        async def work(operation: ServedOperation) -> bytes:
            name = DeploymentName(spec.name)
            asked = self._pending(name, operation)
            if asked is None:
                async with self._model_lock:
                    asked = await self._deploy(spec, operation)
            await self._saved(name, asked)
            return asked.outcome

        return pb.DeployResponse.FromString(await self.operations.once(request.operation_id, request, work))

    async def ListDeployments(self, request: pb.ListDeploymentsRequest, context: Any) -> pb.ListDeploymentsResponse:
        records = sorted(self._loop.state.deployments.values(), key=lambda record: record.name)
        return pb.ListDeploymentsResponse(deployments=[deployment_to_wire(self._view(record)) for record in records])

    async def GetDeployment(self, request: pb.GetDeploymentRequest, context: Any) -> pb.GetDeploymentResponse:
        record = self._loop.state.deployments.get(DeploymentName(request.name))
        if record is None:
            raise NotFoundError(f"name: there is no deployment {request.name[:80]!r}", field="name")
        found = self._view(record)
        if request.outlook:
            found = replace(found, outlook=await self._outlook(record, found.traffic))
        return pb.GetDeploymentResponse(deployment=deployment_to_wire(found))

    async def _outlook(self, record: DeploymentRecord, traffic: Traffic) -> Outlook:
        outlook = await self._planner.outlook(record, traffic) if traffic.requests else Outlook()
        if record.phase is not DeploymentPhase.READY:
            return outlook
        return replace(outlook, losses=await self._planner.losses(record, traffic))

    async def DeleteDeployment(self, request: pb.DeleteDeploymentRequest, context: Any) -> pb.DeleteDeploymentResponse:
        """Returns once the deletion is on disk; the deployment is listed as deleting until its nodes let go."""
        name = DeploymentName(request.name)

        async def work(operation: ServedOperation) -> bytes:
            if self._pending(name, operation) is None:
                await self._loop.ask(DeleteRequested(name, operation, self._loop.now()))
            await self._saved(name, operation)
            return operation.outcome

        outcome = await self.operations.once(request.operation_id, request, work)
        return pb.DeleteDeploymentResponse.FromString(outcome)

    async def Replan(self, request: pb.ReplanRequest, context: Any) -> pb.ReplanResponse:
        """Returns once the move is on disk; the deployment is loading then. A dry run plans only where something is
        new."""
        call = replan_call_from_wire(request)
        name = DeploymentName(call.name)
        if call.dry_run:
            return replan_to_wire(await self._replans.look(name, force=call.force))

        async def work(operation: ServedOperation) -> bytes:
            asked = self._pending(name, operation)
            if asked is None:
                asked = await self._replans.move(name, operation, force=call.force)
            await self._saved(name, asked)
            return asked.outcome

        return pb.ReplanResponse.FromString(await self.operations.once(call.operation_id, request, work))

    async def Trace(self, request: pb.TraceRequest, context: Any) -> AsyncIterator[pb.TraceResponse]:
        for trace in await self._traces.take(DeploymentName(request.deployment), request.seconds):
            yield pb.TraceResponse(stage=trace_to_wire(trace))

    async def Dump(self, request: pb.DumpRequest, context: Any) -> AsyncIterator[pb.DumpResponse]:
        async with aclosing(self._dumps.take()) as dumps:
            async for dump in dumps:
                for message in dump_messages(dump):
                    yield message

    async def ListAudit(self, request: pb.ListAuditRequest, context: Any) -> pb.ListAuditResponse:
        if not 1 <= request.limit <= MOST_ENTRIES:
            raise InvalidArgumentError(f"limit must be 1 to {MOST_ENTRIES}, not {request.limit}", field="limit")
        checks = audit_checks_to_wire(await self._audit.check()) if request.verify else None
        entries = await self._audit.newest(request.limit)
        return pb.ListAuditResponse(entries=[audit_entry_to_wire(entry) for entry in entries], checks=checks)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> AsyncIterator[pb.ListEventsResponse]:
        if request.limit > MOST_EVENTS:
            raise InvalidArgumentError(f"limit must be at most {MOST_EVENTS}, not {request.limit}", field="limit")
        if not request.follow:
            for event in self._events.newest(request.limit):
                yield pb.ListEventsResponse(event=site_event_to_wire(event))
            return
        async with aclosing(self._events.follow(request.limit)) as events:
            async for event in events:
                yield pb.ListEventsResponse(event=site_event_to_wire(event))

    async def _deploy(self, spec: DeploymentSpec, operation: ServedOperation) -> ServedOperation:
        """Place on the newest state until nothing changed meanwhile, then enter the deployment; the operation done."""
        for attempt in range(1, PLACING_ATTEMPTS + 1):
            state = self._loop.state
            if DeploymentName(spec.name) in state.deployments:
                raise AlreadyExistsError(
                    f"name: there is a deployment {spec.name} already; delete it first or choose another name",
                    field="name",
                )
            manifest, digest = self._models.get(spec.model)
            spec = self._as_stored(spec, manifest)
            placement = await self._planner.place(state, spec, manifest, digest)
            record = new_record(state, _blank_record(with_source(spec, placement), digest, placement))
            response = pb.DeployResponse(deployment=deployment_to_wire(deployment_view(state, record)))
            done = replace(operation, outcome=response.SerializeToString())
            try:
                await self._loop.ask(DeployRequested(record, state.version, done, self._loop.now(), manifest.config))
            except AbortedError:
                if attempt == PLACING_ATTEMPTS:
                    raise
                continue
            self._replans.placed(state, record)
            return done
        raise AssertionError("unreachable")

    def _as_stored(self, spec: DeploymentSpec, manifest: ModelManifest) -> DeploymentSpec:
        """Weights that are stored as small integers stay so where a node runs them, which are CPUs."""
        nodes = self._loop.state.nodes.values()
        cpus = [node.name for node in nodes if node.facts.kind == "cpu"]
        which = (EVERY_NODE,) if len(cpus) == len(nodes) else cpus
        return spec.as_stored(parse_config(manifest.config).stored_as, which)

    async def _measure(self, request: MeasureRequest, fingerprint: str) -> MeasureCall:
        """The call with this operation id, begun unless it is there already."""
        operation_id = request.operation_id
        known = self._calls.find(operation_id)
        if known is not None:
            check_same(operation_id, known.fingerprint, fingerprint)
            return known
        compute = None
        if request.model:
            compute = self._measure_compute(request)
        nodes = chosen_nodes(self._loop.state, request.nodes)
        uid = uuid.uuid4().hex
        call = self._calls.begin(operation_id, uid, fingerprint, nodes)
        # Whoever asks for nothing but links wants them measured, not remembered.
        every_link = request.again or compute is None
        try:
            await self._loop.ask(MeasureRequested(uid, tuple(nodes), compute, every_link, self._loop.now()))
        except EdgeShardError:
            self._calls.forget(operation_id)
            raise
        return call

    def _measure_compute(self, request: MeasureRequest) -> MeasureCompute:
        manifest, _ = self._models.get(request.model)
        if request.quantisation is not None:
            check_quantisation(parse_config(manifest.config).architecture)
        return MeasureCompute(manifest.config, request.dtype, request.quick, request.again, request.quantisation)

    def _pending(self, name: DeploymentName, operation: ServedOperation) -> ServedOperation | None:
        """The same call made before, which the disk has not answered yet."""
        known = self._loop.state.pending_operation(name, operation.operation_id)
        if known is not None:
            check_same(operation.operation_id, known.fingerprint, operation.fingerprint)
        return known

    async def _saved(self, name: DeploymentName, operation: ServedOperation) -> None:
        """Until the call is on disk. Raises what the disk refused it with; the call has changed nothing then."""
        operation_id = operation.operation_id
        await answered(self._loop.until(lambda state: state.pending_operation(name, operation_id) is None))
        refused = self._loop.state.refusal(operation_id)
        if refused is not None:
            raise type(refused)(
                f"deployment {name} is as it was: {refused.message}", field=refused.field, reason=refused.reason
            )

    def _view(self, record: DeploymentRecord) -> Deployment:
        view = deployment_view(self._loop.state, record, self._front.active_requests(record.name))
        return replace(view, traffic=self._traffic.of(record.name, record.model))

    def _check_unused(self, name: str) -> ModelManifest:
        manifest, digest = self._models.get(name)
        for record in self._loop.state.deployments.values():
            if record.model == name or record.manifest_digest == digest:
                raise FailedPreconditionError(
                    f"name: model {name} is used by deployment {record.name}; delete that first",
                    field="name",
                    reason="MODEL_IN_USE",
                )
        return manifest


def _blank_record(spec: DeploymentSpec, digest: Digest, placement: Placement) -> DeploymentRecord:
    return DeploymentRecord(
        uid=uuid.uuid4().hex, spec=spec, manifest_digest=digest, placement=placement, epoch=Epoch(NO_EPOCH)
    )
