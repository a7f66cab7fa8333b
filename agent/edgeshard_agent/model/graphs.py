"""Record a function's operations on fixed memory, and repeat them without Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

SWITCH = "EDGESHARD_CUDA_GRAPHS"
"""The environment variable that, set to 0, has decode steps run on CUDA as they run elsewhere."""

_WARM_UPS = 2

Work = Callable[[], torch.Tensor]
"""Computes a tensor from memory at fixed addresses; only the content of the memory changes from call to call."""


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
    """Captures work in CUDA graphs that share one pool of memory, so only one may be replayed at a time."""

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
                for _ in range(_WARM_UPS):  # libraries choose kernels and take workspaces, which a capture must not
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._first is None else self._first.pool()
            # Other threads of the agent ask the driver for free memory, which must not end the capture.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                output = work()
            self._first = self._first or graph

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def recorder_for(device: str) -> Recorder | None:
    """The recorder of decode steps on this device; None if they are better run without recording."""
    torch_device = torch.device(device)
    if torch_device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return None
    return CudaGraphs(torch_device)
