"""Heartbeats as changes: an agent's reports after the first one of a control stream, and the whole again.

Both ends keep the same heartbeat: the agent the one it has sent, the coordinator the one it has received. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from edgeshard.domain.control.commands import Heartbeat, HeartbeatChange, check_stage_count
from edgeshard.domain.nodes.device import StageStatus

HOLDING_INTERVAL_S = 0.9
IDLE_INTERVAL_S = 1.8
"""Seconds between the heartbeats of a node that holds a stage, and of a node without one. Both are
less than the keepalive of a quiet connection, which then never sends a ping."""
MEMORY_NOTICED = 1 / 32
"""Free memory is sent again if it differs by this part of the last value sent."""
SHARE_NOTICED = 0.01
"""The same for the share that others take, as a difference. A share of 0.05 disturbs a measurement."""
NOTHING = HeartbeatChange()
_FIGURES = ("memory_available_bytes", "huge_pages", "others_share", "packed")
"""Fields of a heartbeat that a change contains if they differ."""


def change_between(base: Heartbeat, now: Heartbeat) -> HeartbeatChange:
    """The change that turns `base` into `now`, without figures that hardly differ.

    A change cannot express a failed reading of huge pages; the last one stays.
    """
    before = {stage.key: stage for stage in base.stages}
    keys = {stage.key for stage in now.stages}
    changed = tuple(stage for stage in now.stages if before.get(stage.key) != stage)
    removed = tuple(key for key in before if key not in keys)
    memory, share = now.memory_available_bytes, now.others_share
    told_memory = base.memory_available_bytes
    return HeartbeatChange(
        stages=changed,
        removed=removed,
        memory_available_bytes=memory if abs(memory - told_memory) > MEMORY_NOTICED * told_memory else None,
        huge_pages=now.huge_pages if now.huge_pages != base.huge_pages else None,
        others_share=share if abs(share - base.others_share) > SHARE_NOTICED else None,
        packed=now.packed if now.packed != base.packed else None,
        urgent=bool(removed) or any(_is_news(before.get(stage.key), stage) for stage in changed),
    )


def _is_news(before: StageStatus | None, now: StageStatus) -> bool:
    return before is None or (before.epoch, before.phase) != (now.epoch, now.phase)


def with_change(base: Heartbeat, change: HeartbeatChange) -> Heartbeat:
    """The whole heartbeat; `base` itself if nothing changed.

    Raises InvalidArgumentError naming `stages` when the node would hold more than it can.
    """
    if change == NOTHING:
        return base
    stages = base.stages
    if change.stages or change.removed:
        stages_by_key = {stage.key: stage for stage in stages}
        for key in change.removed:
            stages_by_key.pop(key, None)
        stages_by_key.update((stage.key, stage) for stage in change.stages)
        check_stage_count(len(stages_by_key))
        stages = tuple(stages_by_key.values())
    figures = ((name, getattr(change, name)) for name in _FIGURES)
    return replace(base, stages=stages, **{name: figure for name, figure in figures if figure is not None})
