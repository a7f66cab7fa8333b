"""Decode steps on an accelerator: in buffers of a few fixed shapes, recorded once for each shape
and replayed.

A small batch's step is hundreds of kernels of a few microseconds each; launching them one by one
takes Python longer than running them takes the accelerator. A CUDA graph launches them all at once,
but with the addresses, shapes and numbers it was captured with. So all that changes between steps
is written into buffers first: tokens or hidden states, block tables and lengths. A batch is filled
up to the next shape with rows that belong to no request; they read and write only the pool's
scratch block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import structlog
import torch

from edgeshard.domain.requests.step import Span
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.attention.gathered import GatheredSpans
from edgeshard_agent.model.attention.kv import KvPool
from edgeshard_agent.model.modules import StageModules

SWITCH = "EDGESHARD_CUDA_GRAPHS"
"""The environment variable that, set to 0, has decode steps run on CUDA as they run elsewhere."""

_WARM_UPS = 2

Work = Callable[[], torch.Tensor]
"""Computes a tensor from memory at fixed addresses; only the content of the memory changes from
call to call."""


class Recorder(Protocol):
    """Turns work into something that does it again."""

    def record(self, work: Work) -> Work:
        """The same work, for the content of its memory at each call; the tensor may be the same one
        every time.

        The work may be run meanwhile, more than once. Raises RuntimeError if it cannot be recorded.
        """


class Rerun:
    """Records nothing: runs the work again."""

    def record(self, work: Work) -> Work:
        return work


class CudaGraphs:
    """Captures work in CUDA graphs that share one pool of memory, so only one may be replayed at a
    time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            if self._stream is None:
                new_stream: Any = torch.cuda.Stream  # torch gives its constructor no types
                self._stream = new_stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                # libraries choose kernels and take workspaces, which a capture must not
                for _ in range(_WARM_UPS):
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._first is None else self._first.pool()
            # Other threads of the agent ask the driver for free memory, which must not end the
            # capture.
            with torch.cuda.graph(
                graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                output = work()
            self._first = self._first or graph

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def recorder_for(device: str) -> Recorder | None:
    """The recorder of decode steps on this device; None if they are better run without
    recording."""
    torch_device = torch.device(device)
    if torch_device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return None
    return CudaGraphs(torch_device)


log = structlog.get_logger()

LARGEST_BATCH = 256
"""Rows of the largest shape. Steps of more requests keep an accelerator busy however they are
launched."""
FEWEST_BLOCKS = 8
"""Blocks of the narrowest tables: below that, more shapes would save nothing."""


class StaticShape(NamedTuple):
    """The shape of a recording: a number of rows, and of blocks in each one's table."""

    rows: int
    blocks: int

    @classmethod
    def holding(cls, rows: int, blocks: int, most_blocks: int) -> StaticShape:
        """The least that holds a step: both powers of two, but tables no wider than any request's
        can be."""
        return cls(_power_of_two(rows), min(most_blocks, max(FEWEST_BLOCKS, _power_of_two(blocks))))


class StaticDecode:
    """Runs a stage's steps that consist of decodes only. The pool must have a scratch block, the
    modules be static."""

    def __init__(self, modules: StageModules, pool: KvPool, recorder: Recorder) -> None:
        self._modules = modules
        self._pool = pool
        self._recorder = recorder
        self._most_blocks = min(
            pool.blocks, -(-modules.context.shape.max_context // pool.block_tokens)
        )
        self._steps: dict[StaticShape, _StaticStep] = {}

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether `run` is for this step: every span is one token, and there are not too many."""
        return 0 < len(spans) <= LARGEST_BATCH and all(span.token_count == 1 for span in spans)

    def run(self, spans: Sequence[Span], inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, width] after the stage's blocks, in memory of their own.

        `inputs` are token ids [T] on the CPU on the first stage, hidden states [T, width] on the
        others. Called after the pool has committed the step.
        """
        pool = self._pool
        tables = [
            pool.table(span.request).blocks[: -(-span.end_position // pool.block_tokens)]
            for span in spans
        ]
        shape = StaticShape.holding(len(spans), max(map(len, tables)), self._most_blocks)
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = _StaticStep(shape, self._modules, pool)
        step.fill(tables, [span.end_position for span in spans], inputs)
        if step.replay is None:
            step.replay = self._record(step)
        # A copy: the next step overwrites the recorded memory, and may run before this one's result
        # is sent.
        return step.replay()[: len(spans)].clone()

    def _record(self, step: _StaticStep) -> Work:
        try:
            return self._recorder.record(step.work)
        except RuntimeError as error:  # what torch and CUDA raise, want of memory included
            log.warning(
                "decode_not_recorded", shape=step.shape._asdict(), why=f"{type(error).__name__}: "
                                                                       f"{error}",
                effect="decode steps of this stage are launched kernel by kernel from now on",
            )  # fmt: skip
            self._recorder = Rerun()
            return self._recorder.record(step.work)


class _StaticStep:
    """The buffers of one shape, their computation, and its recording once there is one."""

    def __init__(self, shape: StaticShape, modules: StageModules, pool: KvPool) -> None:
        rows, blocks = shape
        assert pool.scratch_block is not None
        context = modules.context
        device = torch.device(context.device)
        self.shape = shape
        self.replay: Work | None = None
        self._modules = modules
        self._pool = pool
        self._scratch_block = pool.scratch_block
        # One buffer for all integers, so that they travel in one copy.
        self._integers = torch.zeros(rows * (blocks + 2), dtype=torch.int32, device=device)
        self._tables, self._lengths, self._tokens = _parts(self._integers, shape)
        self._hidden: torch.Tensor | None = None
        if not context.is_first:
            width = context.shape.frame_width
            self._hidden = torch.zeros(rows, width, dtype=context.torch_dtype, device=device)

    def fill(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], inputs: torch.Tensor
    ) -> None:
        """Write a step into the buffers."""
        count = len(lengths)
        integers = torch.zeros(self._integers.shape, dtype=torch.int32)
        all_tables, all_lengths, all_tokens = (
            part.numpy() for part in _parts(integers, self.shape)
        )
        all_tables.fill(self._scratch_block)
        for row, table in enumerate(tables):
            all_tables[row, : len(table)] = table
        all_lengths.fill(1)
        all_lengths[:count] = lengths
        if self._hidden is None:
            all_tokens[:count] = inputs.numpy().astype(np.int32)
        else:
            _upload(inputs, self._hidden[:count])
        _upload(integers, self._integers)

    def work(self) -> torch.Tensor:
        """[rows, width] from the buffers as they are. Runs kernels, and reads nothing back."""
        positions = (self._lengths - 1).long().unsqueeze(0)
        spans = GatheredSpans.of_decodes(self._pool, self._tables, self._lengths)
        attention = StepAttention.gathered(self._pool, spans)
        if self._hidden is None:
            hidden = self._modules.embed(self._tokens.long().unsqueeze(0), positions)
        else:
            hidden = self._hidden.unsqueeze(0)
        return self._modules.run(hidden, positions, attention).squeeze(0)


def _parts(
    integers: torch.Tensor, shape: StaticShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables [rows, blocks], lengths [rows] and tokens [rows] as views of one row of integers."""
    rows, blocks = shape
    tables, others = integers[: rows * blocks], integers[rows * blocks :]
    return tables.view(rows, blocks), others[:rows], others[rows:]


def _upload(source: torch.Tensor, buffer: torch.Tensor) -> None:
    if source.is_cpu and buffer.is_cuda:
        # Pinned memory is not reused before the copy is done, so no wait is needed here.
        buffer.copy_(source.pin_memory(), non_blocking=True)
    else:
        buffer.copy_(source)


def _power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << (number - 1).bit_length()
