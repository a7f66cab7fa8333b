"""A stage at work, with a model whose behaviour the test sets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from edgeshard_agent.emulation import EmulatedPace
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.engine.stage_runner import StageRunner
from edgeshard_agent.model.stage import StageOutput
from edgeshard_agent.scheduler.drafting import DraftAsk
from edgeshard_agent.scheduler.scheduler import HeadStep

from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StageExperts, StagePhase, StageStreaming, StageSwap
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import ReturnedStep, Span, StepPlan, WireStep
from edgeshard.process.clock import SystemClock
from edgeshard.wire.frames import Frame

pytestmark = pytest.mark.timing

PATIENCE_S = 60


class Pool:
    bytes_capacity, bytes_in_use = 100, 10
    swapped = StageSwap(50, 20, 3, 1)


class Model:
    """The whole of a pipeline. A step ends when the test lets it, and raises what `failures` has
    for its token."""

    is_first = is_last = True
    layers = LayerRange(0, 2)
    parameter_bytes = 1000
    pool = Pool()
    streaming: StageStreaming | None = None
    experts: StageExperts | None = None

    def __init__(self) -> None:
        self.swept: list[int] = []
        self.together = 100
        self.executed: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.begun, self.let = threading.Event(), threading.Event()

    def execute_sweep(
        self, steps: Sequence[tuple[StepPlan, Any]], told: Sequence[object]
    ) -> list[StageOutput]:
        self.swept.append(len(steps))
        self.executed.extend(int(inputs[0]) for _, inputs in steps)
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        for _, inputs in steps:
            if int(inputs[0]) in self.failures:
                raise self.failures[int(inputs[0])]
        return [StageOutput() for _ in steps[: self.together]]


@dataclass
class Around:
    sent: list[int] = field(default_factory=list)
    broken: list[EdgeShardError] = field(default_factory=list)
    frees: int = 0
    drafted_steps: list[HeadStep] = field(default_factory=list)

    def drafted(self, step: HeadStep) -> None:
        assert step.number not in self.sent
        self.drafted_steps.append(step)

    def send(self, step: WireStep, frames: list[Frame]) -> None:
        assert isinstance(step, ReturnedStep) and frames == []
        self.sent.append(step.number)

    def freed(self) -> None:
        self.frees += 1

    def broke(self, error: EdgeShardError) -> None:
        self.broken.append(error)


@dataclass
class Stage:
    model: Model
    around: Around
    worker: ComputeThread
    runner: StageRunner

    def offer(self, *numbers: int, frees: tuple[int, ...] = (), following: int = 0) -> None:
        for number in numbers:
            plan = StepPlan(spans=(Span(0, number, 1),), frees=frees, following=following)
            self.runner.offer(HeadStep(number, plan, (number,)))

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.model.begun.wait, PATIENCE_S)

    async def all_told(self) -> None:
        """Wait until all offered steps have passed the compute thread, and the event loop has their
        results."""
        self.model.let.set()
        await self.worker.run(lambda: None)
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def stage() -> AsyncIterator[Stage]:
    model = Model()
    around = Around()
    worker = ComputeThread(1)
    name = DeploymentName("tales")
    runner = StageRunner(name, Epoch(1), 0, model, worker, around, SystemClock())  # type: ignore[arg-type]
    runner.start()
    yield Stage(model, around, worker, runner)
    model.let.set()
    worker.close()


async def test_steps_run_in_order_and_are_told_in_order(stage: Stage) -> None:
    stage.offer(0, 1, 2)
    stage.offer(3, frees=(0,))
    await stage.begun()
    status = stage.runner.status(StagePhase.ACTIVE)
    assert (status.phase, status.steps_waiting, status.steps_done) == (StagePhase.ACTIVE, 3, 0)
    await stage.all_told()
    assert stage.model.executed == stage.around.sent == [0, 1, 2, 3]
    assert stage.around.frees == 1
    status = stage.runner.status(StagePhase.ACTIVE)
    assert (status.steps_waiting, status.steps_done, status.tokens_done) == (0, 4, 4)


async def test_a_stage_that_streams_runs_a_sweep_at_once_when_all_of_it_is_there(
    stage: Stage,
) -> None:
    stage.model.streaming = StageStreaming(10, 90)
    stage.model.together = 2  # two of three; the last one runs by itself
    stage.offer(0, following=2)
    stage.offer(1, following=1)
    await asyncio.sleep(0)
    assert stage.model.swept == [] and stage.runner.status(StagePhase.ACTIVE).steps_waiting == 2
    stage.offer(2)
    stage.offer(3)
    await stage.all_told()
    assert stage.model.swept == [3, 1, 1] and stage.around.sent == [0, 1, 2, 3]
    status = stage.runner.status(StagePhase.ACTIVE)
    assert (status.steps_waiting, status.steps_done) == (
        0,
        4,
    ) and status.streaming == StageStreaming(10, 90)


async def test_without_streaming_a_step_waits_for_no_other(stage: Stage) -> None:
    stage.offer(0, following=1)
    await stage.all_told()
    assert stage.around.sent == [0]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (InvalidArgumentError("no such block", reason="BAD_BLOCK"), "BAD_BLOCK"),
        (RuntimeError("a shape"), "STAGE_CRASHED"),
    ],
)
async def test_nothing_runs_behind_a_step_that_failed(
    stage: Stage, failure: Exception, reason: str
) -> None:
    """Not even steps queued before the event loop noticed."""
    stage.model.failures[1] = failure
    stage.offer(0, 1, 2, 3)
    await stage.begun()
    stage.model.let.set()
    await stage.all_told()
    stage.offer(4)
    await stage.all_told()
    assert stage.model.executed == [0, 1] and stage.around.sent == [0]
    assert [error.reason for error in stage.around.broken] == [reason]
    status = stage.runner.status(StagePhase.ACTIVE)
    assert (status.phase, status.steps_waiting) == (StagePhase.FAILED, 0)


async def test_of_a_step_that_a_stop_overtakes_nothing_is_told(stage: Stage) -> None:
    stage.offer(0, 1)
    await stage.begun()
    stage.runner.stop()
    await stage.all_told()
    assert stage.model.executed == [0] and stage.around.sent == [] and stage.around.broken == []


@pytest.mark.parametrize("failing", ["send", "freed"])
async def test_a_result_that_nobody_takes_fails_the_stage(stage: Stage, failing: str) -> None:
    def fail(*_: object) -> None:
        raise InternalError("the outbox is full")

    setattr(stage.around, failing, fail)
    stage.offer(0, frees=(0,))
    await stage.all_told()
    assert [error.message for error in stage.around.broken] == ["the outbox is full"]


class Clock:
    """Shows the time that the test sets."""

    def __init__(self) -> None:
        self.time = 10.0

    def now(self) -> float:
        return self.time


async def test_a_status_tells_how_long_the_step_that_computes_takes_and_what_of_it_it_computed(
    stage: Stage,
) -> None:
    clock = stage.runner.clock = Clock()
    assert stage.runner.running() is None
    stage.offer(0, 1)
    await stage.begun()
    clock.time += 40.0
    status = stage.runner.status(StagePhase.ACTIVE)
    assert status.step_age_s == pytest.approx(40.0) and status.step_cpu_s < 1.0, (
        "it waits for the test"
    )
    running = stage.runner.running()
    assert running is not None and running[1].spans[0].first_position == 0
    await stage.all_told()
    status = stage.runner.status(StagePhase.ACTIVE)
    assert (status.step_age_s, status.step_cpu_s) == (0.0, 0.0)


async def test_a_step_that_computes_shows_processor_time(stage: Stage) -> None:
    def compute() -> bool:
        return sum(range(100)) > 0 and stage.model.let.is_set()

    def execute(steps: Sequence[tuple[StepPlan, Any]], told: Sequence[object]) -> list[StageOutput]:
        stage.model.begun.set()
        while not compute():
            pass
        return [StageOutput()]

    stage.model.execute_sweep = execute  # type: ignore[method-assign]
    stage.offer(0)
    await stage.begun()
    async with asyncio.timeout(PATIENCE_S):
        while stage.runner.status(StagePhase.ACTIVE).step_cpu_s < 0.02:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.001)
    await stage.all_told()


async def test_waiting_in_place_of_an_emulated_device_is_progress(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emulated step of 40 s: the thread sleeps, and the step must not seem to hang."""
    clock = stage.runner.clock = Clock()
    asleep, wake = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        assert seconds == pytest.approx(40.0)
        asleep.set()
        assert wake.wait(PATIENCE_S)

    monkeypatch.setattr("edgeshard_agent.emulation.time.sleep", sleep)
    stage.runner.pace = EmulatedPace(lambda plan: 40.0, clock)
    stage.model.let.set()
    stage.offer(0)
    assert await asyncio.to_thread(asleep.wait, PATIENCE_S)
    clock.time += 30.0
    status = stage.runner.status(StagePhase.ACTIVE)
    assert status.step_age_s == pytest.approx(30.0) and status.step_cpu_s == pytest.approx(
        30.0, abs=1.0
    )
    wake.set()
    await stage.all_told()


async def test_a_stage_that_failed_says_why(stage: Stage) -> None:
    assert stage.runner.status(StagePhase.READY).failure_reason == ""
    stage.runner.fail(InternalError("gone", reason="STAGE_CRASHED"))
    assert stage.runner.status(StagePhase.READY).failure_reason == "STAGE_CRASHED"


class Draft:
    """Guesses as the test sets; `fault` is raised in its place. `followed` are the numbers of
    requests in the steps it saw.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.followed: list[int] = []

    def follow(self, plan: StepPlan, asks: Sequence[DraftAsk]) -> None:
        self.followed += [span.request for span in plan.spans]

    def guess(self, asks: Sequence[DraftAsk]) -> dict[int, tuple[int, ...]]:
        if self.fault is not None:
            raise self.fault
        return {ask.request: (70, 71) for ask in asks}


def asking(number: int) -> HeadStep:
    span = Span(number, 4, 4, sample=True, guesses=3)
    return HeadStep(
        number,
        StepPlan(spans=(span,)),
        (number, 0, 0, 0),
        (DraftAsk(number, (5,) * 4, 2, Sampling(), 3),),
    )


async def test_a_step_runs_with_what_its_draft_guesses_and_the_head_hears_of_it_first(
    stage: Stage,
) -> None:
    draft = stage.runner.drafter = Draft()
    stage.offer(0)
    stage.runner.offer(asking(1))
    await stage.all_told()
    assert stage.around.sent == [0, 1] and draft.followed == [0, 1]
    (ran,) = stage.around.drafted_steps
    assert (ran.tokens, ran.plan.spans[0].guesses, ran.plan.token_count) == ((1, 70, 71), 2, 3)
    assert stage.runner.status(StagePhase.ACTIVE).tokens_done == 4


@pytest.mark.parametrize(
    "fault",
    [ResourceExhaustedError("no memory"), RuntimeError("a shape"), MemoryError(), None],
    ids=repr,
)
async def test_a_draft_that_fails_costs_no_step_and_is_asked_no_more(
    stage: Stage, fault: Exception | None
) -> None:
    """Nor does one that is not there."""
    draft = Draft()
    draft.fault = fault
    stage.runner.drafter = draft if fault is not None else None
    for number in range(3):
        stage.runner.offer(asking(number))
    await stage.all_told()
    assert stage.around.sent == [0, 1, 2] and not stage.around.broken
    assert [ran.tokens for ran in stage.around.drafted_steps] == [(0,), (1,), (2,)]
    assert stage.runner.drafter is None and len(draft.followed) == (fault is not None)
