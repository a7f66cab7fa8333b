"""Deployments that are planned again while they run, for an operator, and the plans that were found
before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import AbortedError
from edgeshard.domain.ids import DeploymentName, NodeId
from edgeshard.wire.site import replan_to_wire
from edgeshard_coordinator.control.persistence.operations import answered
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.runtime.planner import Planner
from edgeshard_coordinator.core.deployments.deployments import check_movable
from edgeshard_coordinator.core.placement.fresh_plan import is_same, judged
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.events import ReplanRequested
from edgeshard_coordinator.core.values.measurements import Measurements
from edgeshard_coordinator.core.values.state import DeploymentRecord, ServedOperation, State

ResultT = TypeVar("ResultT")
PLACING_ATTEMPTS = 5
"""A placement is found again while nodes or deployments change."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, and the site that it was made for."""

    uid: str
    candidates: Sequence[Candidate]
    measured: Mapping[NodeId, Measurements]
    plan: ReplanResult

    def holds(self, now: _Planned) -> bool:
        """Whether nodes, links, profiles and the deployment's placement are the same."""
        nodes = (self.uid, self.candidates) == (now.uid, now.candidates)
        return (
            nodes
            and is_same(self.plan.current, now.plan.current)
            and _same_figures(self.measured, now.measured)
        )


class Replans:
    """Plans deployments again. The last plan of each is kept, so that the question for something
    new costs nothing."""

    def __init__(self, loop: StateLoop, planner: Planner, store: StateStore) -> None:
        self._loop = loop
        self._planner = planner
        self._store = store
        self._known: dict[DeploymentName, _Planned] = {}

    def placed(self, state: State, record: DeploymentRecord) -> None:
        """A new deployment was planned in `state`."""
        self._keep(record, _planned(state, record, _as_it_is(record.placement)))

    async def look(self, name: DeploymentName, *, force: bool) -> ReplanResult:
        """The result that `move` would have. Raises as that does."""
        state = self._loop.state
        record = _movable(state, name)
        now, entry = _planned(state, record, _as_it_is(record.placement)), self._known.get(name)
        if entry is None or not entry.holds(now):
            plan = await self._planner.replan(state, record)
            self._keep(record, replace(now, plan=plan))
            return judged(plan, force=force)
        again = judged(entry.plan, force=force)
        return (
            again
            if again.reason is ReplanReason.WOULD_MOVE
            else replace(again, reason=ReplanReason.NOTHING_NEW)
        )

    async def move(
        self, name: DeploymentName, operation: ServedOperation, *, force: bool
    ) -> ServedOperation:
        """Plan on the newest state until nothing changed meanwhile, then move if it is worth it;
        returns the finished operation.

        Raises NotFoundError, FailedPreconditionError for a deployment that was placed by hand or
        has failed, UnavailableError for one that is not ready, and as the placer does.
        """

        async def moved() -> ServedOperation:
            state = self._loop.state
            record = _movable(state, name)
            plan = judged(await self._planner.replan(state, record), force=force)
            moves = plan.reason is ReplanReason.WOULD_MOVE
            answer = replan_to_wire(replace(plan, reason=ReplanReason.MOVED) if moves else plan)
            done = replace(operation, outcome=answer.SerializeToString())
            if moves:
                now = self._loop.now()
                await self._loop.ask(
                    ReplanRequested(name, record.uid, plan.found, state.version, done, now)
                )
            else:
                await answered(self._store.save_operation(done))
            self._keep(record, _planned(state, record, _as_it_is(plan.found) if moves else plan))
            return done

        return await on_newest_state(moved)

    def _keep(self, record: DeploymentRecord, planned: _Planned) -> None:
        there = self._loop.state.deployments
        self._known = {name: entry for name, entry in self._known.items() if name in there}
        self._known[record.name] = planned


async def on_newest_state(placed: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """The result of `placed` once nothing changed meanwhile. The last of `PLACING_ATTEMPTS` may
    raise AbortedError."""
    for _ in range(PLACING_ATTEMPTS - 1):
        with suppress(AbortedError):
            return await placed()
    return await placed()


def _movable(state: State, name: DeploymentName) -> DeploymentRecord:
    record = state.one_deployment(name)
    check_movable(record)
    return record


def _planned(state: State, record: DeploymentRecord, plan: ReplanResult) -> _Planned:
    # Packed units decide where a deployment moves, not whether. A disk's figures always differ
    # slightly.
    nodes = tuple(replace(node, packed=(), disk=None) for node in state.candidates(record.name))
    return _Planned(record.uid, nodes, state.measured, plan)


def _same_figures(one: Mapping[NodeId, Measurements], other: Mapping[NodeId, Measurements]) -> bool:
    """Whether both have the same figures, whatever their times."""
    if one is other:
        return True
    pairs = (
        (measurements, other[node_id]) for node_id, measurements in one.items() if node_id in other
    )
    same = all(
        measurements is there or _figures(measurements) == _figures(there)
        for measurements, there in pairs
    )
    return one.keys() == other.keys() and same


def _figures(measurements: Measurements) -> object:
    profiles = {key: reported.value for key, reported in measurements.profiles.items()}
    return profiles, {receiver: reported.value for receiver, reported in measurements.links.items()}


def _as_it_is(placement: Placement) -> ReplanResult:
    """The plan in which the best placement is the present one."""
    gain = None if placement.predicted is None else 0.0
    return ReplanResult(placement, placement, placement.predicted, gain, ReplanReason.SAME_LAYERS)
