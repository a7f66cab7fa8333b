"""The time that the engine adds to a step: reading frames, checking, handing to the compute thread,
making frames.

A real `StageRunner` runs steps through a stage of one random block and reports when the result is
ready to be sent. The block's own time is subtracted in the same step, so a noisy machine disturbs
both alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.profile import StepOverhead
from edgeshard.domain.requests.step import ForwardStep, KvGrant, Span, StepPlan, Tensor, WireStep
from edgeshard.process.clock import SystemClock
from edgeshard.wire.frames import Frame, FrameContract, FrameReader, encode_step
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.engine.stage_runner import StageRunner
from edgeshard_agent.measuring.rotation import BLOCK_TOKENS, BlockRotation, LayerForm
from edgeshard_agent.measuring.stops import Stops, no_stops
from edgeshard_agent.measuring.stopwatch import CpuQuota, Measurement, summarise
from edgeshard_agent.model.modules import Batch
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.scheduler.scheduler import HeadStep

NAME = DeploymentName("profile")
PROMPT_TOKENS = 64
LAYERS_IN_BETWEEN = LayerRange(1, 2)
_WARM_UPS = 5
_REPEATS = 40
_LIMIT_S = 2.0


class _Timed:
    """Stands in for the modules' `run_sweep` and remembers how long the block itself took."""

    def __init__(self, rotation: BlockRotation) -> None:
        self._run = rotation.modules.run_sweep
        self._on_accelerator = rotation.device.type == "cuda"
        self.seconds = 0.0
        self.processor_s = 0.0

    def __call__(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        began, computed = time.perf_counter(), time.process_time()
        result = self._run(batches)
        if self._on_accelerator:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - began
        self.processor_s = time.process_time() - computed
        return result


class _Ring:
    """Observes the stage: the result of a step ends the wait for it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def drafted(self, step: HeadStep) -> None:
        pass

    def send(self, step: WireStep, frames: list[Frame]) -> None:
        self.result.set_result(None)

    def freed(self) -> None:
        pass

    def broke(self, error: EdgeShardError) -> None:
        self.result.set_exception(error)


def measure_overhead(
    form: LayerForm,
    layer: int,
    quota: CpuQuota,
    prompt_tokens: int = PROMPT_TOKENS,
    stops: Stops = no_stops,
) -> StepOverhead:
    """The overhead of decode steps, and its growth with the bytes of hidden states, up to the bytes
    of a prompt. There is no growth for a prompt of one token. `quota` has the threads that compute.
    Not for a running event loop."""
    return asyncio.run(_measure(form, layer, quota, prompt_tokens, stops))


async def _measure(
    form: LayerForm, layer: int, quota: CpuQuota, prompt_tokens: int, stops: Stops
) -> StepOverhead:
    shape, dtype = form.shape, form.dtype
    prompt = min(prompt_tokens, shape.max_context - 1)
    room = BLOCK_TOKENS * (2 + prompt // BLOCK_TOKENS)
    rotation = BlockRotation(form, layer, 1, room)
    timed = _Timed(rotation)
    modules: Any = rotation.modules
    modules.run_sweep = timed
    # A stage in the middle: hidden states come in and go out.
    decoder = replace(modules.context.decoder, shape=replace(shape, layer_count=3))
    modules.context = replace(modules.context, layers=LAYERS_IN_BETWEEN, decoder=decoder)
    model = StageModel(StageWeights(shape, LAYERS_IN_BETWEEN, rotation.modules), rotation.pool)
    worker, around = ComputeThread(quota.threads), _Ring()
    runner = StageRunner(NAME, Epoch(1), 1, model, worker, around, SystemClock())
    runner.start()
    try:
        bench = _Bench(runner, model, around, timed, quota, stops)
        few = await bench.measure(1)
        many = await bench.measure(prompt) if prompt > 1 else few
    finally:
        runner.stop()
        worker.close()
    size = (prompt - 1) * shape.frame_width * dtype.itemsize
    growth = max(0.0, many.seconds - few.seconds) / size if size else 0.0
    return StepOverhead(few.seconds, growth, few.spread)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Sends steps through the runner one by one."""

    runner: StageRunner
    model: StageModel
    around: _Ring
    timed: _Timed
    quota: CpuQuota
    stops: Stops

    async def measure(self, tokens: int) -> Measurement:
        durations: list[float] = []
        number, ends = 0, time.monotonic() + _LIMIT_S
        reader = FrameReader(
            FrameContract(NAME, 1, self.model.dtype, self.model.shape.frame_width, tokens, 8)
        )
        while len(durations) < _WARM_UPS + _REPEATS and (
            len(durations) < 2 * _WARM_UPS or time.monotonic() < ends
        ):
            # The sender's encoding is counted at the end of the previous stage, which does it.
            frames = [
                raw.SerializeToString() for raw in encode_step(NAME, 1, self._step(number, tokens))
            ]
            number = number + 1
            stops = self.stops()
            seconds = await self._once(reader, frames)
            if stops == self.stops():
                durations.append(seconds)
        self.model.reset()
        return summarise(durations[_WARM_UPS:])

    async def _once(self, reader: FrameReader, frames: list[bytes]) -> float:
        self.around.result = asyncio.get_running_loop().create_future()
        began, computed = time.perf_counter(), time.process_time()
        for raw in frames:
            for step in reader.accept(Frame.FromString(raw)).steps:
                if not isinstance(step, ForwardStep):
                    raise InternalError("the codec changed a forward step")
                self.runner.offer(step)
        await self.around.result
        seconds = time.perf_counter() - began - self.timed.seconds
        processor_s = time.process_time() - computed - self.timed.processor_s
        return max(0.0, self.quota.sustained_s(seconds, processor_s))

    def _step(self, number: int, tokens: int) -> ForwardStep:
        # Each step is a new request's first: its blocks come back with the next step.
        blocks = tuple(range(-(-tokens // BLOCK_TOKENS)))
        slot = 0 if self.model.pool.states.slots else None
        frees, span = (number - 1,) if number else (), Span(number, 0, tokens)
        grant = KvGrant(number, 0, blocks, slot=slot)
        plan = StepPlan(frees=frees, grants=(grant,), spans=(span,))
        dtype, width = self.model.dtype, self.model.shape.frame_width
        return ForwardStep(
            number, plan, Tensor(dtype, (tokens, width), bytes(tokens * width * dtype.itemsize))
        )
