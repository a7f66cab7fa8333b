"""Watches the compute thread: if its call hangs, the node's stages fail, and their site continues without the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import EdgeShardError
from edgeshard_agent.core.hanging import CHECK_S, RunningStep, Watched, hangs, looked_at
from edgeshard_agent.engine.worker import ComputeThread, step_hangs

log = structlog.get_logger()


class Stage(Protocol):
    """A stage as the check sees it."""

    def running(self) -> RunningStep | None:
        """The step that computes now."""

    def fail(self, error: EdgeShardError) -> None: ...


class HangCheck:
    """`run` looks at the stages of the node, on the event loop. They share one thread: when a step hangs, all fail."""

    def __init__(self, stages: Callable[[], Sequence[Stage]], worker: ComputeThread, clock: Clock) -> None:
        self._stages = stages
        self._worker = worker
        self._clock = clock
        self._watched: dict[Stage | ComputeThread, Watched] = {}
        self.found_well = 0
        """Looks so far at which the thread was idle or got on."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.look()

    def look(self) -> None:
        now, stages = self._clock.now(), self._stages()
        watched: tuple[Stage | ComputeThread, ...] = (*stages, self._worker)
        running = [(one, step) for one in watched if (step := one.running()) is not None]
        self._watched = {one: looked_at(self._watched.get(one), step, now) for one, step in running}
        hanging = [step for one, step in running if hangs(self._watched[one], step)]
        if hanging and not self._worker.hangs:
            log.error("step_stalled", age_s=round(hanging[0].age_s), cpu_s=round(hanging[0].cpu_s, 3))
            self._worker.give_up()
            for stage in stages:
                stage.fail(step_hangs())
        if not self._worker.hangs:
            self.found_well += 1
