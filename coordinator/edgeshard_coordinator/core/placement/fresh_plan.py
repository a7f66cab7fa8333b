"""A running deployment planned again, for the nodes that are there now, to compare with its
placement. Pure."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.placement import Placement, Prediction
from edgeshard.domain.deployments.traffic import WORTH_SAYING
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard_coordinator.core.placement.nearest_placement import without_held
from edgeshard_coordinator.core.placement.problem import PlacementProblem, Placer
from edgeshard_coordinator.core.placement.repair import layers_of, moved_bits


def planned_again(placer: Placer, problem: PlacementProblem, current: Placement) -> ReplanResult:
    """The gain by another placement than the current one.

    The source is the spec's or, while that is away, the node that has the head instead. Raises as
    the placer does.
    """
    head, candidates = current.head.node_name, problem.candidates
    is_there = any(node.name == problem.spec.source and node.placeable for node in candidates)
    anew = problem if is_there else problem.with_spec(source=head)
    placement = placer.place(anew)
    expected, note = current.predicted, ""
    try:
        now = placer.place(problem.with_spec(layers=layers_of(current), source=head))
        expected, note = now.predicted or expected, now.note if now.predicted is None else ""
    except EdgeShardError as error:
        # Such as a pool for all requests that does not fit: the earlier prediction remains.
        note = error.message
    gain = _gain(expected, placement.predicted)
    if (
        gain is not None
        and gain < WORTH_SAYING
        and any(node.packed_parts != NOTHING_HELD for node in candidates)
    ):
        # Packed units of nodes decide where to move, not whether.
        best = placer.place(replace(anew, candidates=without_held(candidates)))
        if (more := _gain(expected, best.predicted)) is not None and more >= WORTH_SAYING:
            placement, gain = best, more
    placement = replace(
        placement, note=f"{placement.note} {moved_bits(current, placement, candidates)}".strip()
    )
    if gain is None and placement.predicted is None:
        note = placement.note
    plan = ReplanResult(
        current, placement, expected, gain, ReplanReason.SAME_LAYERS, note if gain is None else ""
    )
    return judged(plan)


def judged(plan: ReplanResult, *, force: bool = False) -> ReplanResult:
    """The plan with the reason `WOULD_MOVE`, or the reason why it does not move. Only other layers
    move, with `force` whatever their gain."""
    if is_same(plan.current, plan.found):
        reason = ReplanReason.SAME_LAYERS
    elif force or (plan.gain is not None and plan.gain >= WORTH_SAYING):
        reason = ReplanReason.WOULD_MOVE
    else:
        reason = ReplanReason.NOT_WEIGHED if plan.gain is None else ReplanReason.SMALL_GAIN
    return replace(plan, reason=reason)


def is_same(one: Placement, other: Placement) -> bool:
    """Whether each node has the same layers."""
    layers = [
        [(stage.node_id, stage.layers) for stage in placement.stages] for placement in (one, other)
    ]
    return layers[0] == layers[1]


def _gain(here: Prediction | None, there: Prediction | None) -> float | None:
    if here is None or there is None or here.objective != there.objective:
        return None
    return here.gain_of(there)
