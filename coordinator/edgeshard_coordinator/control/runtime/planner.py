"""The placer, called in a thread: a planner may take seconds, and it reads the state itself, which
is frozen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgeshard.domain.control.site import ReplanResult
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedDraft, Placement
from edgeshard.domain.deployments.traffic import Loss, Outlook, Traffic
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Digest, ModelName, NodeId, NodeName
from edgeshard.domain.models.model import ModelManifest
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.control.runtime.solver import Solver
from edgeshard_coordinator.core.deployments.losses import Repaired, loss_of
from edgeshard_coordinator.core.deployments.standby import choose
from edgeshard_coordinator.core.placement.by_memory import checked_shape, sizes_of
from edgeshard_coordinator.core.placement.fresh_plan import planned_again
from edgeshard_coordinator.core.placement.nearest_placement import with_held
from edgeshard_coordinator.core.placement.problem import (
    PlacementProblem,
    Placer,
    of_nodes_there,
    typical_request,
)
from edgeshard_coordinator.core.placement.repair import Lost, without_most
from edgeshard_coordinator.core.placement.replicated import place_replicas, without_siblings
from edgeshard_coordinator.core.placement.source_choice import place_from_any
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.state import DeploymentRecord, StandbyChoice, State


class Planner:
    """Plans and repairs placements. `state` returns the newest state. Every call raises as the
    placer does."""

    def __init__(
        self, state: Callable[[], State], models: Models, placer: Placer, traffic: TrafficBook
    ) -> None:
        self._state = state
        self._models = models
        self._placer = placer
        self._traffic = traffic
        self._solver = Solver()

    async def place(
        self,
        state: State,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        digest: Digest,
        draft: PlacedDraft | None = None,
    ) -> Placement:
        """A placement, from the best source if the spec names none. A replica is placed in addition
        to the others of its name. `digest` is the manifest's."""
        traffic = self._traffic.of(DeploymentName(spec.served_name), ModelName(spec.model))

        def place(sourced: DeploymentSpec, nodes: Sequence[Candidate]) -> Placement:
            return self._placer.place(
                PlacementProblem(sourced, manifest, nodes, state.measured, traffic, draft)
            )

        def placed() -> Placement:
            candidates = with_held(
                without_siblings(state, spec, state.candidates()), spec, manifest, digest
            )
            return (
                place(spec, candidates) if spec.source else place_from_any(spec, candidates, place)
            )

        return await self._solver.run(placed)

    async def place_replicas(
        self,
        state: State,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        digest: Digest,
        draft: PlacedDraft | None = None,
    ) -> tuple[Placement, ...]:
        """The placements of all replicas that the spec requests, on disjoint nodes, or of the one
        that it is; each with a draft of its own."""
        if spec.replicas == 1 or spec.replica:
            return (await self.place(state, spec, manifest, digest, draft),)
        traffic = self._traffic.of(DeploymentName(spec.name), ModelName(spec.model))

        def place(sourced: DeploymentSpec, nodes: Sequence[Candidate]) -> Placement:
            return self._placer.place(
                PlacementProblem(sourced, manifest, nodes, state.measured, traffic, draft)
            )

        def placed() -> tuple[Placement, ...]:
            candidates = with_held(state.candidates(), spec, manifest, digest)
            return place_replicas(
                spec, candidates, lambda nodes: place_from_any(spec, nodes, place)
            )

        return await self._solver.run(placed)

    async def replan(self, state: State, record: DeploymentRecord) -> ReplanResult:
        """The placement of a deployment compared with the best one for the nodes of `state`."""
        problem = self._problem(state, record)
        return await self._solver.run(
            lambda: planned_again(self._placer, problem(), record.placement)
        )

    async def outlook(self, record: DeploymentRecord, traffic: Traffic) -> Outlook:
        problem = self._problem(self._state(), record, traffic)
        return await self._solver.run(lambda: self._placer.outlook(problem(), record.placement))

    async def losses(self, record: DeploymentRecord, traffic: Traffic) -> tuple[Loss, ...]:
        """The cost of each node's death. Each is planned for as if it had happened."""
        state = self._state()
        spec = record.spec
        placement = record.placement
        manifest, _ = self._models.get(record.manifest_digest)
        typical = typical_request(
            spec, spec.max_context or checked_shape(spec, manifest).max_context, traffic
        )
        problem_factory = self._problem(state, record, traffic)

        def repaired(node_id: NodeId, name: NodeName, problem: PlacementProblem) -> Repaired:
            began = time.monotonic()
            loss = Lost(frozenset({node_id}), frozenset(state.bad_links))
            outcome: Placement | EdgeShardError
            try:
                outcome = self._placer.repair(problem, placement, loss)
            except EdgeShardError as error:
                outcome = error
            return Repaired(name, outcome, time.monotonic() - began)

        def weighed() -> tuple[Loss, ...]:
            problem = problem_factory()
            return tuple(
                loss_of(
                    state,
                    record,
                    repaired(stage.node_id, stage.node_name, problem),
                    problem.candidates,
                    typical,
                )
                for stage in placement.stages
            )

        return await self._solver.run(weighed)

    async def standbys(self, state: State, record: DeploymentRecord) -> tuple[StandbyChoice, ...]:
        """The nodes that are to keep weights of others' layers."""
        placement = record.placement
        manifest, _ = self._models.get(record.manifest_digest)
        former = [entry.node_id for entry in record.standbys if entry.layers is not None]

        def chosen() -> tuple[StandbyChoice, ...]:
            candidates = without_siblings(state, record.spec, state.candidates(record.name))
            spec = of_nodes_there(record.spec, candidates)
            return choose(spec, placement, candidates, sizes_of(spec, manifest, placement), former)

        return await self._solver.run(chosen)

    async def repair(self, state: State, record: DeploymentRecord) -> Placement:
        """A placement without the nodes that are away or failed the deployment, and over no bad
        link.

        One that could not move goes back to what it had, whose nodes failed it only with other
        layers.
        """
        problem_factory = self._problem(state, record)
        broken, avoided = record.placement, record.avoided
        if record.former is not None:
            broken = record.former
            avoided -= {stage.node_id for stage in broken.stages}

        def repaired() -> Placement:
            problem = problem_factory()
            return without_most(
                lambda links: self._placer.repair(problem, broken, Lost(avoided, frozenset(links))),
                state.bad_links,
            )

        return await self._solver.run(repaired)

    def _problem(
        self, state: State, record: DeploymentRecord, traffic: Traffic | None = None
    ) -> Callable[[], PlacementProblem]:
        """A function that makes, off the event loop, the problem of a deployment. Its own memory
        counts as free, and it includes the units of its model that nodes hold. If `traffic` is
        None, the requests that it has served count."""
        manifest, _ = self._models.get(record.manifest_digest)
        served = self._traffic.of(record.served_name, record.model) if traffic is None else traffic

        def made() -> PlacementProblem:
            there = without_siblings(state, record.spec, state.candidates(record.name))
            spec = of_nodes_there(record.spec, there)
            nodes = with_held(there, spec, manifest, record.manifest_digest)
            return PlacementProblem(
                spec, manifest, nodes, state.measured, served, record.placement.draft
            )

        return made
