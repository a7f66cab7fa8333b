"""Two agents, each capped by a cgroup, run a model several times as large as what they may hold, as their plan said.

    python -m bench.capped DIR [--cap 700] [--memory 380] [--tokens 64]

DIR takes the checkpoint of 2.3 GB with random weights. It needs a memory controller of cgroup v1 that this user may
make groups in. The site is on loopback and its state goes with it. Printed are the plan, as it is said before anything
starts, and what 64 tokens then took, beside what was predicted; and of each agent the most memory it ever had.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from bench.big_llama import DEEP_CONFIG, write_checkpoint
from edgeshard import Client
from edgeshard.cli.local import LocalCluster
from edgeshard.domain.deployment import parse_spec
from edgeshard.domain.dtypes import DType
from edgeshard.domain.generation import Token

_GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def capped(name: str, limit: int) -> Iterator[Path]:
    """A cgroup with a limit of memory, page cache included; gone afterwards, when its processes are."""
    group = _GROUPS / f"edgeshard-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def most_resident(pid: int) -> int:
    """The most memory that a process ever had for itself, files it had mapped included, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


async def run(options: argparse.Namespace, state: Path, groups: dict[str, Path]) -> None:
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
            (group / "cgroup.procs").write_text(str(pids[name]))
        idle = {name: most_resident(pid) for name, pid in pids.items() if pid}
        print("idle agents:", ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in idle.items()))
        await client.add_model(options.directory / "deep", "big")
        async for _ in client.profile("big", dtype=DType.BFLOAT16, quick=True):
            pass
        await measured(options, client)
        for name, pid in pids.items():
            used = int((groups[name] / "memory.max_usage_in_bytes").read_text())
            assert pid
            print(f"{name}: resident at most {most_resident(pid) / 1e6:.0f} MB, group at most {used / 1e6:.0f} MB")


async def measured(options: argparse.Namespace, client: Client) -> None:
    spec = parse_spec(
        {
            "name": "big",
            "model": "big",
            "source": "a",
            "concurrency": 1,
            "max_context": 256,
            "prompt_tokens": 8,
            "new_tokens": options.tokens,
            "allow_streaming": True,
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
        times: list[float] = []
        prompt = tuple(range(10, 18))
        async for event in client.generate(
            "big", prompt, max_new_tokens=options.tokens, ignore_eos=True, timeout_s=1800
        ):
            if isinstance(event, Token):
                times.append(time.perf_counter())
        took = (times[-1] - times[0]) / (len(times) - 1)
        steps = [later - earlier for earlier, later in pairwise(times)]
        print(
            f"{len(times)} tokens: {took:.3f} s a token (median {statistics.median(steps):.3f}), predicted "
            f"{predicted.time_per_token_s:.3f}: {took / predicted.time_per_token_s:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cap", type=int, default=700, help="MB of each agent's group")
    parser.add_argument("--memory", type=int, default=380, help="MiB that stages may use")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    write_checkpoint(options.directory / "deep", DEEP_CONFIG)
    cap = options.cap * 10**6
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as state,
        capped("a", cap) as one,
        capped("b", cap) as other,
    ):
        asyncio.run(run(options, Path(state), {"a": one, "b": other}))


if __name__ == "__main__":
    main()
