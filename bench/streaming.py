"""Steps of a stage that streams weights from the disk, compared with only reading and only
computing.

    python -m bench.streaming DIR [--budgets 25 50 75] [--sweeps 1 4] [--requests 4] [--steps 8]
                                  [--capped]

DIR takes the checkpoint of 2.3 GB that `bench.loading` writes, and its packed files. Each case is a
process of its own. One with all weights in memory measures the computing of a sweep. One for each
budget (percent of the weights) measures a sweep and its reads without computing. It also reports
the bytes read by `/proc/self/io`, and the memory of the process above its memory before it loaded.
The tokens must equal the tokens of the stage in memory. With `--capped` each budget's process is in
a memory cgroup (v1) that allows what an idle one had, the budget, the KV and 64 MB.

Reading takes processor time, too, which computing then lacks. So each sweep is also compared with
the time of computing with the cores that reading leaves: the processor time of both divided by the
cores (`shared`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weight_loading import Packing
from edgeshard_agent.model.weights.weights import StageWeights

from bench.cgroups import capped, command_inside, most_bytes
from bench.loading import BIG_CONFIG, sources_in
from bench.random_llama import write_checkpoint
from bench.safetensors_directory import SafetensorsDirectory
from bench.sizes import sized
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan

PROMPT = 8
_SLACK_BYTES = 64_000_000
BLOCK_TOKENS = 16


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * next(
        int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")
    )


def read_bytes() -> int:
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes"))


def load(
    directory: Path, budget: int | None, quantisation: Quantisation | None, blocks: int
) -> StageModel:
    layers = LayerRange(0, BIG_CONFIG["num_hidden_layers"])
    return StageModel.with_kv(
        StageWeights.load(
            SafetensorsDirectory(directory / "checkpoint"),
            BIG_CONFIG,
            layers,
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=quantisation,
            packing=Packing(sources_in(directory, layers, quantisation), budget),
        ),
        KvMemory(DType.BFLOAT16, blocks, BLOCK_TOKENS),
    )


class Requests:
    """Some requests in some micro-batches, which continue with the returned tokens."""

    def __init__(self, requests: int, sweep: int, steps: int) -> None:
        self._groups = [range(first * requests, (first + 1) * requests) for first in range(sweep)]
        self._blocks = -(-(PROMPT + steps) // BLOCK_TOKENS)
        self._position = 0
        self.tokens: dict[int, list[int]] = {}

    @property
    def kv_blocks(self) -> int:
        return self._blocks * sum(len(group) for group in self._groups)

    def steps(self) -> list[tuple[StepPlan, Any]]:
        first, count = self._position, 1 if self._position else PROMPT
        self._position += count
        made = []
        for group in self._groups:
            spans = tuple(
                Span(
                    r,
                    first,
                    count,
                    sample=True,
                    sampling=None if first else Sampling(temperature=0.0),
                )
                for r in group
            )
            table = [tuple(range(r * self._blocks, (r + 1) * self._blocks)) for r in group]
            grants = (
                ()
                if first
                else tuple(KvGrant(r, 0, blocks) for r, blocks in zip(group, table, strict=True))
            )
            prompt = np.arange(len(group) * PROMPT) * 37 % sized(15_000, 500) if not first else None
            inputs = prompt if prompt is not None else np.array([self.tokens[r][-1] for r in group])
            made.append((StepPlan(grants=grants, spans=spans), inputs.astype(np.int64)))
        return made

    def take(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            for sampled in output.result.tokens:
                self.tokens.setdefault(sampled.request, []).append(sampled.token)


def case(options: argparse.Namespace) -> None:
    """One process: load, run, and print the result on the last line."""
    torch.set_num_threads(options.threads)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    before = resident_bytes()
    requests = Requests(options.requests, options.sweep, options.steps + 1)
    quantisation = Quantisation(options.quantise) if options.quantise else None
    stage = load(options.directory, options.budget, quantisation, requests.kv_blocks)
    seconds = []
    io = []
    busy = []
    for _ in range(options.steps + 1):
        steps = requests.steps()
        read = read_bytes()
        began = time.perf_counter()
        used = time.process_time()
        requests.take(stage.execute_sweep(steps))
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - used)
        io.append(read_bytes() - read)
    seen: dict[str, Any] = {
        "sweep_s": statistics.median(seconds[1:]),
        "busy_s": statistics.median(busy[1:]),
        "read": statistics.mean(io[1:]),
        "memory": resident_bytes() - before,
        "before": before,
        "kv": stage.pool.bytes_capacity,
        "tokens": [tokens for _, tokens in sorted(requests.tokens.items())],
        "weights": stage.parameter_bytes,
    }
    filled = stage.weights.filled
    if (store := filled.store) is not None and filled.residency is not None:
        seen |= {"streamed": store.streamed_bytes, "held": filled.residency.resident_bytes}
        began, used = time.perf_counter(), time.process_time()
        for _ in range(3):  # rounds of reads with nothing computed
            for layer in range(BIG_CONFIG["num_hidden_layers"]):
                if store.streams(layer):
                    store.acquire(layer)
                    store.release(layer)
        seen["read_s"] = (time.perf_counter() - began) / 3
        seen["read_busy_s"] = (time.process_time() - used) / 3
    stage.release()
    print(json.dumps(seen))


def measured(
    options: argparse.Namespace, budget: int | None, sweep: int, group: Path | None = None
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "bench.streaming",
        str(options.directory),
        "--case",
        "--sweep",
        str(sweep),
    ]
    for name in ("requests", "steps", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--quantise", options.quantise] if options.quantise else []
    command += ["--budget", str(budget)] if budget is not None else []
    command = command if group is None else command_inside(group, command)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--budgets", type=int, nargs="+", default=[25, 50, 75])
    parser.add_argument("--sweeps", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=4, help="in each micro-batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantise", default="")
    parser.add_argument("--capped", action="store_true", help="in a memory cgroup")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sweep", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(options)
        return
    write_checkpoint(options.directory / "checkpoint", BIG_CONFIG)
    for sweep in options.sweeps:
        plain = measured(options, None, sweep)
        size, computed = plain["weights"] / 1e9, plain["sweep_s"]
        print(f"sweeps of {sweep} x {options.requests}: {size:.2f} GB in memory, {computed:.3f} s")
        for percent in options.budgets:
            budget = plain["weights"] * percent // 100
            limit = plain["before"] + budget + plain["kv"] + _SLACK_BYTES
            with capped("streaming", limit) if options.capped else nullcontext() as group:
                seen = measured(options, budget, sweep, group)
                of_group = (
                    f"; group at most {most_bytes(group) / 1e6:.0f} MB of {limit / 1e6:.0f}"
                    if group
                    else ""
                )
            shared = (plain["busy_s"] + seen["read_busy_s"]) / options.threads
            bound = max(seen["read_s"], plain["sweep_s"])
            rate = seen["streamed"] / seen["read_s"] / 1e9
            of_it = seen["read"] / seen["streamed"]
            print(
                f"  budget {percent} % ({budget / 1e6:.0f} MB): streams "
                f"{seen['streamed'] / 1e9:.2f} GB, "
                f"sweep {seen['sweep_s']:.3f} s, read alone {seen['read_s']:.3f} s ({rate:.2f} "
                "GB/s): "
                f"{seen['sweep_s'] / bound:.2f} of the larger, "
                f"{seen['sweep_s'] / max(bound, shared):.2f} with "
                f"{shared:.3f} s of shared cores; {of_it:.3f} of that read a sweep; "
                f"memory {seen['memory'] / 1e6:.0f} MB of "
                f"{(budget + seen['kv']) / 1e6:.0f}{of_group}; "
                f"tokens {'equal' if seen['tokens'] == plain['tokens'] else 'DIFFER'}"
            )


if __name__ == "__main__":
    main()
