"""A stage at work: steps in, one by one through the compute thread, steps out.

It keeps the draft tokens of steps that the head sent to the sampling stage until each step is
computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import structlog
import torch

from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.nodes.device import StagePhase, StageStatus
from edgeshard.domain.requests.generation import StageTiming
from edgeshard.domain.requests.step import (
    ForwardStep,
    GuessedTokens,
    ReturnedStep,
    StepPlan,
    Tensor,
    WireStep,
)
from edgeshard.wire.frames import PART_BYTES, Frame, encode_step
from edgeshard_agent.core.hanging import RunningStep
from edgeshard_agent.engine.compute_thread import ComputeThread, StepOnThread
from edgeshard_agent.engine.recording import BusyMeter, StepCounts, StepRecorder
from edgeshard_agent.model.stage import StageModel, StageOutput
from edgeshard_agent.model.tensors import bytes_to_hidden, hidden_to_bytes
from edgeshard_agent.scheduler.drafting import DraftAsk
from edgeshard_agent.scheduler.scheduler import HeadStep

MOST_STEPS = 64
"""More than are in flight: of older ones the guesses came too late."""


class ToldGuesses:
    """Guesses by step; for several threads. No guess of a step without an entry counts, and no
    thread waits for one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_step: dict[int, GuessedTokens] = {}

    def put(self, step: int, guessed: GuessedTokens) -> None:
        with self._lock:
            self._by_step[step] = guessed
            if len(self._by_step) > MOST_STEPS:
                del self._by_step[min(self._by_step)]

    def take(self, step: int) -> GuessedTokens:
        """Those of a step, as far as they have come."""
        with self._lock:
            return self._by_step.pop(step, {})


log = structlog.get_logger()


class DraftRunner(Protocol):
    """A draft, on the compute thread: `edgeshard_agent.engine.drafter`."""

    def follow(self, plan: StepPlan, asks: Sequence[DraftAsk]) -> None:
        """A step is about to run."""

    def guess(self, asks: Sequence[DraftAsk]) -> GuessedTokens:
        """Guesses for requests of it."""


class StageObserver(Protocol):
    """Hears of a stage at work. No call blocks."""

    def drafted(self, step: HeadStep) -> None:
        """A step of the head that asked the draft has been computed like this."""

    def send(self, step: WireStep, frames: list[Frame]) -> None:
        """A finished step: to the next stage, or into the head of a one-stage pipeline."""

    def freed(self) -> None:
        """KV blocks were freed."""

    def broke(self, error: EdgeShardError) -> None:
        """The stage failed and runs nothing more. Called once."""


class Pace(Protocol):
    """Holds computed steps back. The lab has one, for nodes that pretend to be others
    (`edgeshard_agent.emulation`)."""

    def hold(self, plan: StepPlan, arrived_s: float, on_thread: StepOnThread | None) -> None:
        """Return when a step that came at `arrived_s` may be done; on the compute thread, after it
        was computed."""


_Offered = tuple[HeadStep | ForwardStep, float]
"""A step and when it arrived."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """A computed step that is to be sent; the compute thread worked on it from `began_s` to
    `ended_s`."""

    result: WireStep
    frames: list[Frame]
    began_s: float
    ended_s: float


@dataclass(eq=False)
class StageRunner:
    """One stage of one epoch.

    A step goes straight to the compute thread's queue, so that the next one begins there without a
    turn of the event loop between them. The head keeps at most a window of steps in flight, so at
    most a window wait here, and `offer` never blocks. A step that cannot be run fails the stage.
    """

    deployment: DeploymentName
    epoch: Epoch
    index: int
    """Its number in the pipeline."""
    model: StageModel
    worker: ComputeThread
    around: StageObserver
    clock: Clock
    pace: Pace | None = None
    recorder: StepRecorder | None = field(default=None, init=False)
    """Told of each step, while there is one."""
    failure: EdgeShardError | None = field(default=None, init=False)
    drafter: DraftRunner | None = field(default=None, init=False)
    """Makes the head's guesses; dropped when it fails, which costs no step."""

    def __post_init__(self) -> None:
        self.part_bytes: Callable[[], int] = lambda: PART_BYTES
        """The most bytes that frames of a step may have; asked on the compute thread for each
        step."""
        self.told = ToldGuesses()
        self._waiting: list[_Offered] = []
        """Steps of a sweep whose others are still on their way."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._broken = False
        """On the compute thread: a step has failed, and the event loop may not know yet."""
        self._steps_offered = 0
        self._steps_begun = 0
        self._steps_done = 0
        self._tokens_done = 0
        self._busy = BusyMeter(self.clock.now())
        self.counts = StepCounts()
        self._on_thread: StepOnThread | None = None

    def start(self) -> None:
        """The observer is called on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Stop after the step that is computing, if any; its result is dropped."""
        self._stopped = True

    def offer(self, step: HeadStep | ForwardStep) -> None:
        self._steps_offered += 1
        self._waiting.append((step, self.clock.now()))
        if self.model.streaming is None or not step.plan.following:
            steps, self._waiting = self._waiting, []
            self.worker.submit_steps(self._run, steps)

    def running(self) -> tuple[RunningStep, StepPlan] | None:
        """The step that computes now."""
        step = self._on_thread
        return None if step is None else (step.so_far(self.clock.now()), step.plan)

    def fail(self, error: EdgeShardError) -> None:
        """Stop for good; the coordinator is notified and decides."""
        if self.failure is None:
            self.failure = error
            log.error(
                "stage_failed",
                deployment=self.deployment,
                stage=self.index,
                reason=error.reason,
                why=error.message,
            )
            self.around.broke(error)

    def status(self, phase: StagePhase) -> StageStatus:
        pool, running = self.model.pool, self.running()
        return StageStatus(
            deployment=self.deployment,
            epoch=self.epoch,
            stage=self.index,
            layers=self.model.layers,
            phase=StagePhase.FAILED if self.failure else phase,
            parameter_bytes=self.model.parameter_bytes,
            kv_bytes_capacity=pool.bytes_capacity,
            kv_bytes_in_use=pool.bytes_in_use,
            steps_done=self._steps_done,
            tokens_done=self._tokens_done,
            busy_share=self._busy.share(self.clock.now()),
            steps_waiting=0 if self._has_ended else self._steps_offered - self._steps_begun,
            step_age_s=running[0].age_s if running else 0.0,
            step_cpu_s=running[0].cpu_s if running else 0.0,
            failure_reason=self.failure.reason if self.failure else "",
            streaming=self.model.streaming,
            experts=self.model.experts,
            swap=pool.swapped,
        )

    @property
    def _has_ended(self) -> bool:
        return self._stopped or self.failure is not None

    def _run(self, steps: list[_Offered]) -> None:
        """Run a step, or the steps of a sweep, on the compute thread, and tell the event loop."""
        assert self._loop is not None
        while steps:
            self._steps_begun += 1
            if self._has_ended or self._broken:
                return
            first, arrived_s = steps[0]
            ran: list[_Ran] | EdgeShardError
            self._on_thread = StepOnThread(self._steps_begun, first.plan, self.clock.now())
            try:
                steps = [(self._drafted(step), arrived_s) for step, arrived_s in steps]
                ran = self._compute(steps)
            except EdgeShardError as error:
                ran = error
            except Exception as error:
                ran = self._crashed(error)
            finally:
                self._on_thread = None
            if isinstance(ran, EdgeShardError):
                # Later steps in the queue would run on a pool that it left half done.
                self._broken = True
                self._tell(first, arrived_s, ran)
                return
            self._steps_begun += len(ran) - 1
            for (step, arrived_s), result in zip(steps, ran, strict=False):
                self._tell(step, arrived_s, result)
            steps = steps[len(ran) :]

    def _drafted(self, step: HeadStep | ForwardStep) -> HeadStep | ForwardStep:
        """The step with guesses from the draft, made on the compute thread; without guesses if that
        fails."""
        if not isinstance(step, HeadStep) or (self.drafter is None and not step.asks):
            return step
        guesses: GuessedTokens = {}
        try:
            if self.drafter is not None:
                self.drafter.follow(step.plan, step.asks)
                guesses = self.drafter.guess(step.asks) if step.asks else guesses
        except Exception as error:
            self.drafter = None
            reason = error.reason if isinstance(error, EdgeShardError) else type(error).__name__
            log.warning("draft_failed", deployment=self.deployment, reason=reason)
        return step.with_drafted(guesses) if step.asks else step

    def _tell(
        self, step: HeadStep | ForwardStep, arrived_s: float, ran: _Ran | EdgeShardError
    ) -> None:
        assert self._loop is not None
        # the loop was closed meanwhile: the daemon is ending
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended, step, arrived_s, ran)

    def _ended(
        self, step: HeadStep | ForwardStep, arrived_s: float, ran: _Ran | EdgeShardError
    ) -> None:
        """Send the result of a step, or fail; on the event loop."""
        if self._has_ended:
            return
        if isinstance(ran, EdgeShardError):
            self.fail(ran)
            return
        try:
            self._note(step, arrived_s, ran)
            if isinstance(step, HeadStep) and step.is_drafted:
                self.around.drafted(step)
            self.around.send(ran.result, ran.frames)
            if step.plan.frees:
                self.around.freed()
        except EdgeShardError as error:
            self.fail(error)
        except Exception as error:
            self.fail(self._crashed(error))

    def _crashed(self, error: Exception) -> InternalError:
        log.error("stage_crashed", deployment=self.deployment, stage=self.index, exc_info=error)
        return InternalError(
            f"stage {self.index} crashed: {type(error).__name__}", reason="STAGE_CRASHED"
        )

    def _note(self, step: HeadStep | ForwardStep, arrived_s: float, ran: _Ran) -> None:
        self._steps_done += 1
        self._tokens_done += step.plan.token_count
        self._busy.add(ran.ended_s - ran.began_s)
        self.counts.ran(arrived_s, ran.began_s, ran.ended_s)
        if self.recorder is not None:
            self.recorder.ran(step.number, step.plan, arrived_s, ran.began_s, ran.ended_s)

    def _compute(self, steps: Sequence[_Offered]) -> list[_Ran]:
        """Run as many of these steps as go together, on the compute thread, and make their frames.

        Each counts as its part of the time that they took.
        """
        began = self.clock.now()
        guess_sources = [partial(self.told.take, step.number) for step, _ in steps]
        outputs = self.model.execute_sweep(
            [(step.plan, self._inputs(step)) for step, _ in steps], guess_sources
        )
        results, share = [], 0.0
        for (step, arrived_s), output in zip(steps, outputs, strict=False):
            waited_s = began - arrived_s
            hidden = _tensor(output.hidden, self.model)
            if self.pace is not None:
                self.pace.hold(step.plan, arrived_s, self._on_thread)
            if not share:
                share = (self.clock.now() - began) / len(outputs)
            timing = StageTiming(self.index, waited_s, share)
            result = self._result(step, output, hidden, timing)
            # The only stage of a pipeline hands its result to the head in its own process: nothing
            # travels.
            alone = self.model.is_first and self.model.is_last
            frames = (
                [] if alone else encode_step(self.deployment, self.epoch, result, self.part_bytes())
            )
            results.append((result, frames))
        part = (self.clock.now() - began) / len(results)
        return [
            _Ran(result, frames, began + index * part, began + (index + 1) * part)
            for index, (result, frames) in enumerate(results)
        ]

    def _result(
        self,
        step: HeadStep | ForwardStep,
        output: StageOutput,
        hidden: Tensor | None,
        timing: StageTiming,
    ) -> WireStep:
        timings = (*(step.timings if isinstance(step, ForwardStep) else ()), timing)
        if self.model.is_last:
            return ReturnedStep(step.number, replace(output.result, timings=timings))
        return ForwardStep(step.number, step.plan, hidden, timings)

    def _inputs(
        self, step: HeadStep | ForwardStep
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]] | torch.Tensor | None:
        if isinstance(step, HeadStep):
            return np.array(step.tokens, dtype=np.int64) if step.tokens else None
        if step.hidden is None:
            return None
        return bytes_to_hidden(step.hidden.data, step.hidden.dtype, step.hidden.shape)


def _tensor(hidden: torch.Tensor | None, model: StageModel) -> Tensor | None:
    if hidden is None:
        return None
    return Tensor(model.dtype, tuple(hidden.shape), hidden_to_bytes(hidden))
