"""Decoding with the KV of one long sequence in a file, in a group of processes whose memory is smaller than the KV.

    python -m bench.kv_on_disk DIR [--positions 32768] [--cap 256] [--steps 6]

An experiment: no deployment does this. The file lies in DIR without a name, and is mapped in the place of the pool's
memory. Each case is a process of its own; those that are capped join a group of cgroup v1 before they take the pool, so
that its limit, of --cap MB, holds for the KV's pages (this user must be able to make groups there). The cases:

  memory   as the product is, not capped; and capped, where the kernel is expected to end it
  mapped   the file, whose pages the kernel keeps as it likes
  ahead    while a layer computes, the next one's pages are asked for (MADV_WILLNEED), in a thread of its own
  kept     as ahead, and the pages of layers beyond a budget are given back once used, so that the others stay

The sequence's positions are filled with random numbers, and its last ones decoded. The logits must be those of
`memory`, bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import edgeshard_agent.model.attention.kv
import numpy as np
import torch
from edgeshard_agent.measuring.disk import measure_disk
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from bench.cgroups import capped
from bench.random_llama import CONFIG, RandomWeights
from bench.sizes import sized
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

CASES = (("memory", False), ("memory", True), ("mapped", False), ("mapped", True), ("ahead", True), ("kept", True))[
    :: sized(1, 5)
]
LAYERS, BLOCK_TOKENS = 16, 16
SMALL = CONFIG | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
_MADV_WILLNEED = 3


class FileMemory:
    """Memory in a file without a name. `file` is its descriptor, `address` where it is mapped."""

    def __init__(self, directory: Path, size: int) -> None:
        self._opened = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (as long as the process lasts)
        self.file, self.size = self._opened.fileno(), size
        os.posix_fallocate(self.file, 0, size)
        # Shared, or pages that were written would be anonymous memory, which cannot go back to the file.
        self._map = mmap.mmap(self.file, size, flags=mmap.MAP_SHARED)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # without Python's lock, unlike mmap's own
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def ask_for(self, offset: int, size: int) -> None:
        if self._madvise(self.address + offset, size, _MADV_WILLNEED):
            raise OSError(ctypes.get_errno(), "madvise")

    def give_back(self, offset: int, size: int) -> None:
        """Write what was changed, and forget the pages."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)
        os.fdatasync(self.file)
        os.posix_fadvise(self.file, offset, size, os.POSIX_FADV_DONTNEED)


class Ahead:
    """Asks for the next layer's pages while one computes, and gives back those of the layers from `kept` on."""

    def __init__(self, memory: FileMemory, kept: int) -> None:
        self._memory, self._kept = memory, kept
        self._layer_bytes = memory.size // LAYERS
        self._work: queue.SimpleQueue[tuple[bool, int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begins(self, layer: int) -> None:
        self._work.put((True, (layer + 1) % LAYERS))
        if self._kept < LAYERS and (layer - 1) % LAYERS >= self._kept:
            self._work.put((False, (layer - 1) % LAYERS))

    def _run(self) -> None:
        while True:
            is_next, layer = self._work.get()
            act = self._memory.ask_for if is_next else self._memory.give_back
            act(layer * self._layer_bytes, self._layer_bytes)


def layer_by_layer(ahead: Ahead | None) -> None:
    """Steps go through one layer after the other, in all cases, since what runs several at once cannot be told when."""
    attend = StepAttention.attend

    def watched(self: StepAttention, layer: int, *arguments: Any) -> torch.Tensor:
        if ahead is not None:
            ahead.begins(layer)
        return attend(self, layer, *arguments)

    StepAttention.attend = watched  # type: ignore[method-assign,assignment]
    StepAttention.native_arenas = lambda self, layers: []  # type: ignore[method-assign]


def filled(stage: StageModel, positions: int, steps: int, memory: FileMemory | None) -> KvPool:
    """A pool in which a sequence has so many positions of random numbers, the same each time."""
    blocks = -(-(positions + steps) // BLOCK_TOKENS)
    shape = stage.shape
    pool = KvPool(stage.layers, blocks, BLOCK_TOKENS, shape.kv_heads, shape.head_dim, DType.BFLOAT16, "cpu")
    pool.commit(pool.check(StepPlan(grants=(KvGrant(1, 0, tuple(range(blocks))),), spans=(Span(1, 0, positions),))))
    generator = torch.Generator().manual_seed(5)
    piece = 1024
    for layer in range(LAYERS):
        for first in range(0, positions, piece):
            slots = torch.arange(first, min(first + piece, positions))
            numbers = torch.randn(2, len(slots), shape.kv_heads, shape.head_dim, generator=generator)
            pool.arena(layer).write(slots, numbers[0], numbers[1])
        if memory is not None:
            size = memory.size // LAYERS
            memory.give_back(layer * size, size)
    return pool


def read_bytes() -> int:
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes"))


def case(options: argparse.Namespace) -> None:
    """One process; what it saw on its last line."""
    torch.set_num_threads(options.threads)
    config = SMALL | {"max_position_embeddings": 2 * options.positions}
    stage = StageModel.with_kv(
        StageWeights.load(
            RandomWeights(config=config), config, LayerRange(0, LAYERS), dtype=DType.BFLOAT16, device="cpu"
        ),
        KvMemory(DType.BFLOAT16, 1, BLOCK_TOKENS),
    )
    memory = None
    if options.group:
        (options.group / "cgroup.procs").write_text(str(os.getpid()))
    blocks = -(-(options.positions + options.steps + 1) // BLOCK_TOKENS)
    size = blocks * BLOCK_TOKENS * 2 * stage.shape.kv_heads * stage.shape.head_dim * 2 * LAYERS
    if options.case != "memory":
        memory = FileMemory(options.directory, size)
        tensor = memory.tensor
        edgeshard_agent.model.attention.kv.zeroed = lambda shape, dtype, device: tensor.view(dtype).view(shape)  # type: ignore
    stage.pool = filled(stage, options.positions, options.steps + 1, memory)
    assert stage.pool.bytes_capacity == size
    ahead = None
    if memory is not None and options.case in ("ahead", "kept"):
        kept = LAYERS if options.case == "ahead" else max(0, options.budget * 10**6 * LAYERS // size - 3)
        ahead = Ahead(memory, kept)
    layer_by_layer(ahead)
    digest, token, seconds, read = hashlib.sha256(), 1, list[float](), list[int]()
    for step in range(options.steps + 1):
        span = Span(1, options.positions + step, 1, sample=True, sampling=None if step else Sampling(temperature=0.0))
        before, began = read_bytes(), time.perf_counter()
        logits = stage.logits(StepPlan(spans=(span,)), np.array([token]))
        seconds.append(time.perf_counter() - began)
        read.append(read_bytes() - before)
        digest.update(logits.float().numpy().tobytes())
        token = int(logits.argmax())
    print(json.dumps({"kv": size, "step_s": seconds[1:], "read": read[1:], "logits": digest.hexdigest()}))


def measured(options: argparse.Namespace, name: str, group: Path | None) -> dict[str, Any] | int:
    """What a case saw, or how it ended."""
    command = [sys.executable, "-m", "bench.kv_on_disk", str(options.directory), "--case", name]
    for option in ("positions", "steps", "threads"):
        command += [f"--{option}", str(getattr(options, option))]
    command += ["--budget", str(options.cap)] + (["--group", str(group)] if group is not None else [])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--positions", type=int, default=32_768)
    parser.add_argument("--cap", type=int, default=256, help="MB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(options)
        return
    disk = measure_disk(options.directory)
    rates = (disk.read_bytes_per_s / 1e9, disk.write_bytes_per_s / 1e9) if disk is not None else (0.0, 0.0)
    print(f"disk: reads {rates[0]:.2f} GB/s past the page cache, writes {rates[1]:.2f} GB/s flushed")
    right = ""
    for name, is_capped in CASES:
        with ExitStack() as stack:
            group = stack.enter_context(capped("kv", options.cap * 10**6)) if is_capped else None
            seen = measured(options, name, group)
        told = f"{name}{f' in {options.cap} MB' if is_capped else ''}: "
        if isinstance(seen, int):
            print(f"{told}ended with {seen}", flush=True)
            continue
        right = right or seen["logits"]
        step_s, read = statistics.median(seen["step_s"]), statistics.median(seen["read"])
        print(
            f"{told}{step_s:.3f} s a token ({min(seen['step_s']):.3f} to {max(seen['step_s']):.3f}), reads "
            f"{read / 1e9:.2f} of {seen['kv'] / 1e9:.2f} GB each ({read / step_s / 1e9:.2f} GB/s), logits "
            f"{'equal' if seen['logits'] == right else 'DIFFER'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
