"""A plan against reality: two real agents of one pinned core each, and a prediction from their own profiles.

A random Llama of 316 M parameters in bfloat16 is profiled in a process of its own, pinned like an agent, while the
other core runs the same profile: decoding reads weights from the memory both cores share. Then it is deployed in
halves, and what a client sees is compared with what the planner says of the same cut. The loopback link is given, as
`edgeshard_agent.measuring.probing` measured it on such a machine.

    python -m bench.real_plan [-o FILE] [--rounds 5] [--prompt-tokens 128] [--new-tokens 32]    JSON
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.profile_check import LLAMA_316M
from edgeshard.architectures import expected_tensors
from edgeshard.cli.local import LocalCluster
from edgeshard.client import Client
from edgeshard.domain.deployment import parse_spec
from edgeshard.domain.dtypes import DType
from edgeshard.domain.generation import Token
from edgeshard.domain.profile import ComputeProfile
from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.devices import parse_cluster
from edgeshard.planning.instance import Cut
from edgeshard.planning.measured import MeasuredTimes
from edgeshard.planning.plan import predict
from edgeshard.planning.problem import PlanProblem
from edgeshard.planning.shapes import model_from_config

BOXES = ("a", "b")
LIMIT = 0.15
LOOPBACK = {"bandwidth_bps": 6e9, "latency_s": 1e-4}


def write_model(directory: Path) -> None:
    """The random model as a Hugging Face directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_316M), encoding="utf-8")
    torch.manual_seed(0)
    tensors = {}
    for tensor in expected_tensors(LLAMA_316M).values():
        values = torch.ones(tensor.shape) if "norm" in tensor.name else 0.02 * torch.randn(tensor.shape)
        tensors[tensor.name] = values.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")


def profile_both(config: Path, scratch: Path) -> tuple[ComputeProfile, ...]:
    """Both cores profile at the same time, as both will compute at the same time."""
    command = [sys.executable, "-m", "edgeshard_agent.measuring", "--config", str(config), "--dtype", "bfloat16"]
    running = [
        subprocess.Popen(
            ["taskset", "-c", str(core), *command, "--threads", "1", "--state-dir", str(scratch / name), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for core, name in enumerate(BOXES)
    ]
    return tuple(ComputeProfile.from_json(process.communicate()[0]) for process in running)


def pin(site: LocalCluster) -> None:
    """Each agent on a core of its own."""
    for core, name in enumerate(BOXES):
        pid = site.agents[name].pid
        assert pid is not None
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


async def measure(client: Client, prompt_tokens: int, new_tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token, and median seconds between tokens."""
    prompt = [(31 * seed + 7 * position) % 16000 for position in range(prompt_tokens)]
    began, arrivals = time.perf_counter(), list[float]()
    events = client.generate("real", prompt, max_new_tokens=new_tokens, ignore_eos=True)
    async with aclosing(events) as stream:
        async for event in stream:
            if isinstance(event, Token):
                arrivals.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return arrivals[0] - began, statistics.median(gaps)


async def run(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    write_model(scratch / "model")
    profiles = profile_both(scratch / "model" / "config.json", scratch)
    layers = int(LLAMA_316M["num_hidden_layers"])
    cut = Cut((0, 1), (layers // 2, layers))
    device = {"memory_bytes": 8e9, "bandwidth_bytes_per_s": 1e10, "flops": 1e11}
    cluster = parse_cluster({"source": "a", "device": [{"name": name, **device} for name in BOXES], "link": [LOOPBACK]})
    problem = PlanProblem(
        model=model_from_config("llama-316m", LLAMA_316M),
        cluster=cluster,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        batch=1,
        dtype=DType.BFLOAT16,
        times={name: MeasuredTimes.of(profile) for name, profile in zip(BOXES, profiles, strict=True)},
    )
    prediction = predict(Costs(problem), Load(), cut)
    samples = []
    async with LocalCluster(scratch, BOXES, threads=1) as site, Client(site.address) as client:
        pin(site)
        await client.add_model(scratch / "model", "real")
        spec = {"name": "real", "model": "real", "source": "a", "dtype": "bfloat16", "concurrency": 1}
        placed = f"a=0:{layers // 2},b={layers // 2}:{layers}"
        await client.deploy(parse_spec({**spec, "max_context": 1024, "layers": placed}), timeout_s=180)
        await measure(client, arguments.prompt_tokens, 4, 99)
        for number in range(arguments.rounds):
            samples.append(await measure(client, arguments.prompt_tokens, arguments.new_tokens, number))
    ttft, per_token = (statistics.median(values) for values in zip(*samples, strict=True))
    off = {"ttft": prediction.ttft_s / ttft - 1, "time_per_token": prediction.time_per_token_s / per_token - 1}
    return {
        "benchmark": "real_plan",
        "predicted": {"ttft_s": prediction.ttft_s, "time_per_token_s": prediction.time_per_token_s},
        "measured": {"ttft_s": ttft, "time_per_token_s": per_token},
        "deviation": off,
        "within_limit": all(abs(value) <= LIMIT for value in off.values()),
        "stage_s": prediction.decode.stage_s,
        "samples": samples,
        "load_1_minute": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-real-") as scratch:
        report = asyncio.run(run(arguments, Path(scratch)))
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 0 if report["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
