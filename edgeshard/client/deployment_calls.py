"""Deployments: planned, placed, moved, traced and deleted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing

from edgeshard.client.connection import Calls, operation_id
from edgeshard.domain.clock import Clock
from edgeshard.domain.control.site import (
    NO_OPERATION,
    DeleteCall,
    DeployCall,
    ReplanCall,
    ReplanResult,
)
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import (
    AbortedError,
    DeadlineError,
    EdgeShardError,
    FailedPreconditionError,
    NotFoundError,
)
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.proto.v1 import admin_pb2
from edgeshard.proto.v1.admin_pb2_grpc import AdminServiceStub
from edgeshard.wire.site import (
    delete_call_to_wire,
    deploy_call_to_wire,
    deployment_from_wire,
    placement_from_wire,
    replan_call_to_wire,
    replan_from_wire,
    spec_to_wire,
    trace_from_wire,
)

_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 0.5


class DeploymentCalls(Calls):
    """An operator's calls about deployments."""

    async def plan(self, spec: DeploymentSpec) -> Placement:
        """The placement `deploy` would make now; changes nothing. Raises as `deploy` does."""
        return (await self.plan_replicas(spec))[0]

    async def plan_replicas(self, spec: DeploymentSpec) -> tuple[Placement, ...]:
        """The placements of all replicas that `deploy` would make now; changes nothing. Raises as
        `deploy` does."""
        response = await self._admin("Plan", admin_pb2.PlanRequest(spec=spec_to_wire(spec)))
        return tuple(
            placement_from_wire(placement) for placement in (response.placement, *response.further)
        )

    async def deploy(
        self,
        spec: DeploymentSpec,
        wait: bool = True,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
        *,
        measure_s: float = 0.0,
    ) -> Deployment:
        """Place a model and load it; with `wait`, until it answers requests.

        Nodes without a measurement of the model, and the links between them, are measured first,
        for up to `measure_s` seconds; 0 places with the known figures. The placement's note names
        what was not measured.

        `on_change` gets every intermediate state. `timeout_s` bounds the waiting (None, no bound);
        the deployment continues to load after it. If there are several replicas, it waits for all,
        and returns the first. A spec that is one of several replicas (`Deployment.spec`, with its
        name and number) replaces a replica that is gone: it is placed on other nodes than the
        remaining ones.

        Raises PlacementError or ResourceExhaustedError when the placement cannot be (nothing is
        changed then), the deployment's own typed failure when a node could not load its share, and
        DeadlineError.
        """
        request = deploy_call_to_wire(DeployCall(operation_id(), spec, measure_s))
        answer = await self._connection.call(
            AdminServiceStub, "Deploy", request, self._timeout_s + measure_s
        )
        deployment = deployment_from_wire(answer.deployment)
        if not wait:
            return deployment
        further = () if spec.replica else deployment.spec.replica_names[1:]
        return await self._until_ready(
            (deployment, *further), timeout_s, on_change or (lambda _: None)
        )

    async def wait_ready(
        self,
        name: str,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Deployment:
        """Wait until a deployment, or each replica of a name, answers requests, and return it or
        the first. Arguments and errors are as in `deploy`; also raises NotFoundError."""
        return await self._until_ready(
            await self.replicas(name), timeout_s, on_change or (lambda _: None)
        )

    async def deployments(self) -> tuple[Deployment, ...]:
        response = await self._admin("ListDeployments", admin_pb2.ListDeploymentsRequest())
        return tuple(deployment_from_wire(deployment) for deployment in response.deployments)

    async def deployment(self, name: str, outlook: bool = False) -> Deployment:
        """One deployment, or the first of a name's replicas; with `outlook` also its performance
        for the traffic it has seen, compared with other placements.

        Raises NotFoundError.
        """
        response = await self._admin(
            "GetDeployment", admin_pb2.GetDeploymentRequest(name=name, outlook=outlook)
        )
        return deployment_from_wire(response.deployment)

    async def replicas(self, name: str, outlook: bool = False) -> tuple[Deployment, ...]:
        """All replicas of a name, in their order; the deployment itself if it is the only one.
        Raises NotFoundError."""
        first = await self.deployment(name, outlook)
        if first.spec.name == name:
            return (first,)
        served = first.spec.served_name
        there = {
            other.spec.name
            for other in await self.deployments()
            if other.spec.served_name == served
        }
        names = [
            other
            for other in first.spec.replica_names
            if other in there and other != first.spec.name
        ]
        return (first, *[await self.deployment(other, outlook) for other in names])

    async def delete_deployment(
        self, name: str, wait: bool = True, timeout_s: float | None = None, *, force: bool = False
    ) -> None:
        """Stop a deployment, or all replicas of a name, and free its memory on every node; with
        `wait`, until it is gone.

        With `force` it is gone as soon as the coordinator's disk has forgotten it: nodes release it
        when they can. Raises NotFoundError, and DeadlineError after `timeout_s` (None, no bound) of
        waiting.
        """
        call = DeleteCall(operation_id(), name, force)
        await self._admin("DeleteDeployment", delete_call_to_wire(call))
        polls = _Polls(self._clock, timeout_s)
        while wait:
            try:
                await self.deployment(name)
            except NotFoundError:
                return
            if not await polls.next():
                raise DeadlineError(
                    f"deployment {name} still exists after {timeout_s:g} s", reason="WAIT_TIMEOUT"
                )

    async def replan(
        self,
        name: str,
        *,
        dry_run: bool = False,
        force: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> ReplanResult:
        """Plan a deployment that is ready for the nodes that are there now, and move it if that
        gains 5 % or more.

        Its requests pause and continue with the next token. For replicas, give the name of one, not
        of all. `force` moves it whatever the gain. `dry_run` only plans, which costs next to
        nothing while nodes, links and profiles stay unchanged (`ReplanReason.NOTHING_NEW`). With
        `wait` it is ready when this returns; `on_change` gets every intermediate state.

        Raises NotFoundError, FailedPreconditionError if the deployment was placed by hand or has
        failed, and UnavailableError while it is not ready. Raises AbortedError if other nodes could
        not take it over and it continues elsewhere, and DeadlineError after `timeout_s` (None, no
        bound) of waiting.
        """
        call = ReplanCall(name, dry_run, force, NO_OPERATION if dry_run else operation_id())
        replan = replan_from_wire(await self._admin("Replan", replan_call_to_wire(call)))
        if not (replan.changed and wait):
            return replan
        failed: list[EdgeShardError] = []

        def changed(deployment: Deployment) -> None:
            failed.extend([deployment.failure] if deployment.failure is not None else [])
            if on_change is not None:
                on_change(deployment)

        ready = await self._until_ready((await self.deployment(name),), timeout_s, changed)
        target_layers, got = (
            [(stage.node_name, stage.layers) for stage in placement.stages]
            for placement in (replan.found, ready.placement)
        )
        if got != target_layers:
            where = ",".join(f"{node}={layers}" for node, layers in got)
            why = failed[0].message if failed else "a node failed"
            raise AbortedError(
                f"deployment {name} did not move ({why}); it stays on {where}",
                field="name",
                reason="NOT_MOVED",
            )
        return replan

    async def trace(self, name: str, seconds: float = 5.0) -> tuple[StageTrace, ...]:
        """The steps of each stage of a deployment, or of one replica, in the next `seconds` (0.1 to
        60), on the nodes' own clocks.

        `edgeshard.domain.requests.trace.aligned` puts them on one. Recording costs the nodes next
        to nothing. Raises InvalidArgumentError naming `seconds`, NotFoundError,
        FailedPreconditionError when the deployment is not ready, AbortedError when it stops running
        meanwhile or another trace of it begins, DeadlineError.
        """
        request = admin_pb2.TraceRequest(deployment=name, seconds=seconds)
        async with aclosing(self._connection.stream("Trace", request)) as messages:
            return tuple([trace_from_wire(message.stage) async for message in messages])

    async def _until_ready(
        self,
        deployments: Sequence[Deployment | str],
        timeout_s: float | None,
        on_change: Callable[[Deployment], None],
    ) -> Deployment:
        """The first of these, some by name, once all are ready."""
        polls = _Polls(self._clock, timeout_s)
        ready = [
            await self._until_one_ready(
                await self.deployment(one) if isinstance(one, str) else one, polls, on_change
            )
            for one in deployments
        ]
        return ready[0]

    async def _until_one_ready(
        self, deployment: Deployment, polls: _Polls, on_change: Callable[[Deployment], None]
    ) -> Deployment:
        name = deployment.spec.name
        on_change(deployment)
        while deployment.phase is not DeploymentPhase.READY:
            if deployment.phase is DeploymentPhase.FAILED:
                raise deployment.failure or FailedPreconditionError(
                    f"deployment {name} failed", field="deployment"
                )
            if not await polls.next():
                raise DeadlineError(
                    f"deployment {name} is still {deployment.phase} after {polls.timeout_s:g} s; "
                    "it continues in "
                    f"the background: see `edgectl describe deployment {name}`",
                    reason="WAIT_TIMEOUT",
                )
            latest = await self.deployment(name)
            if (latest.phase, latest.stages) != (deployment.phase, deployment.stages):
                on_change(latest)
            deployment = latest
        return deployment


class _Polls:
    """Pauses between polls, growing from 0.05 to 0.5 s, until the time is over."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self._until_s = clock.now() + self.timeout_s
        self._pause_s = _FIRST_POLL_S

    async def next(self) -> bool:
        """Wait for the next poll; False, at once, when the time is over."""
        left_s = self._until_s - self._clock.now()
        if left_s > 0:
            await asyncio.sleep(min(self._pause_s, left_s))
            self._pause_s = min(self._pause_s * 1.3, _LONGEST_POLL_S)
        return left_s > 0
