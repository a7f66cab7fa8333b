"""Agents, each capped by a cgroup, run a model several times as large as what they may hold, as their plan said.

    python -m bench.capped DIR [--agents a b] [--cap 700] [--memory 380] [--tokens 64] [--requests 1]
        [--quantise int4]

DIR takes the checkpoint of 2.3 GB with random weights. It needs a memory controller of cgroup v1 that this user may
make groups in; `--cap 0` does without. The site is on loopback and its state goes with it. Printed are the plan, as it
is said before anything starts, and what 64 tokens of each request then took, beside what was predicted; and of each
agent the most memory it ever had.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from bench.big_llama import DEEP_CONFIG, write_checkpoint
from bench.cgroups import capped, most_bytes
from bench.site_calls import arrivals, profiled
from edgeshard import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.local.cluster import LocalCluster


def most_resident(pid: int) -> int:
    """The most memory that a process ever had for itself, files it had mapped included, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


async def run(options: argparse.Namespace, state: Path, groups: dict[str, Path | None]) -> None:
    cluster = LocalCluster(
        state,
        tuple(groups),
        agent_arguments=("--memory", f"{options.memory}MiB", "--pack", "always"),
        threads=options.threads,
        startup_timeout_s=180,
    )
    async with cluster, cluster.client() as client:
        pids = {name: cluster.agents[name].pid for name in groups}
        for name, group in groups.items():
            if group is not None:
                (group / "cgroup.procs").write_text(str(pids[name]))
        idle = {name: most_resident(pid) for name, pid in pids.items() if pid}
        print("idle agents:", ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in idle.items()))
        await client.add_model(options.directory / "deep", "big")
        kind = Quantisation(options.quantise) if options.quantise else None
        for name in groups:  # one after the other: they share a disk and cores
            await profiled(client, "big", [name], dtype=DType.BFLOAT16, quick=True, quantisation=kind)
        await measured(options, client)
        for name, pid in pids.items():
            group = groups[name]
            assert pid
            of_group = "" if group is None else f", group at most {most_bytes(group) / 1e6:.0f} MB"
            above, allowed = (most_resident(pid) - idle[name]) / 1e6, options.memory * 1.048576
            print(f"{name}: resident at most {above:.0f} MB above idle, of {allowed:.0f} that stages may use{of_group}")


async def measured(options: argparse.Namespace, client: Client) -> None:
    spec = parse_spec(
        {
            "name": "big",
            "model": "big",
            "source": options.agents[0],
            "concurrency": options.requests,
            "max_context": 256,
            "prompt_tokens": 8,
            "new_tokens": options.tokens,
            "allow_streaming": True,
            "quantisation": dict.fromkeys(options.agents, options.quantise) if options.quantise else {},
        }
    )
    print((await client.plan(spec)).note)
    began = time.perf_counter()
    deployment = await client.deploy(spec)
    budget = sum(stage.weight_budget_bytes or stage.parameter_bytes for stage in deployment.placement.stages)
    weights = budget + sum(stage.streamed_bytes for stage in deployment.placement.stages)
    print(f"deployed in {time.perf_counter() - began:.1f} s; weights may take {budget / 1e6:.0f} MB")
    print(f"the model has {weights / 1e9:.2f} GB, slots included, {weights / budget:.2f} of that")
    predicted = deployment.placement.predicted
    assert predicted is not None
    for _ in range(2):
        prompts = [tuple(range(10 + seed, 18 + seed)) for seed in range(options.requests)]
        asked = (arrivals(client, "big", prompt, options.tokens, timeout_s=1800) for prompt in prompts)
        times = [[at for at, _ in came] for came in await asyncio.gather(*asked)]
        if options.requests == 1:
            took = (times[0][-1] - times[0][0]) / (len(times[0]) - 1)
            steps = [later - earlier for earlier, later in pairwise(times[0])]
            print(
                f"{len(times[0])} tokens: {took:.3f} s a token (median {statistics.median(steps):.3f}), predicted "
                f"{predicted.time_per_token_s:.3f}: {took / predicted.time_per_token_s:.2f}"
            )
            continue
        began, ended = max(some[0] for some in times), min(some[-1] for some in times)
        rate = sum(began < at <= ended for some in times for at in some) / (ended - began)
        print(
            f"{options.requests} requests, all decoding: {rate:.2f} tokens/s, predicted "
            f"{predicted.throughput_tps:.2f}: {rate / predicted.throughput_tps:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--agents", nargs="+", default=["a", "b"])
    parser.add_argument("--cap", type=int, default=700, help="MB of each agent's group; 0 for no group")
    parser.add_argument("--memory", type=int, default=380, help="MiB that stages may use")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quantise", default="")
    parser.add_argument("--requests", type=int, default=1, help="at once")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    write_checkpoint(options.directory / "deep", DEEP_CONFIG)
    with tempfile.TemporaryDirectory(dir=options.directory) as state, ExitStack() as made:
        groups = {
            name: made.enter_context(capped(name, options.cap * 10**6)) if options.cap else None
            for name in options.agents
        }
        asyncio.run(run(options, Path(state), groups))


if __name__ == "__main__":
    main()
