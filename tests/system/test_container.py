"""edgectl serve demo in control groups of 900 MiB and half a core: it fits, and is about as fast as
its plan."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.cgroups import GROUPS, capped, command_inside, most_bytes, part_of_a_core
from edgeshard.rpc.addresses import free_port

pytestmark = [
    pytest.mark.timing,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not GROUPS.is_dir(), reason="needs root and memory groups of cgroup v1"
    ),
]

LIMIT_BYTES = 900 << 20
CORES = 0.5
READY_S = 240.0
PROMPTS = (
    "Once upon a time",
    "The king said",
    "A poor woman had",
    "In the forest",
    "When the moon rose",
)
LEAST_OF_PLAN = 0.33
"""The least ratio of measured to planned tokens/s. It was 0.27 before the profiler counted quotas.
The coordinator's work for each token is in the container, too, and not in the plan. So the ratio
depends on the machine: on different days it was 0.38 to 0.64."""


class Container:
    """A site of `edgectl serve demo` in the groups `memory` and `core`."""

    def __init__(self, directory: Path, memory: Path, core: Path) -> None:
        self.memory = memory
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("EDGESHARD__", "XDG_"))
        }
        self.environment = {**clean, "HOME": str(directory)}
        self.log = directory / "serve.log"
        port = free_port("127.0.0.1", 28000, 400)
        command = [sys.executable, "-m", "edgeshard.cli.main", "serve", "demo", "--port", str(port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command_inside(memory, command_inside(core, command)),
                cwd=directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while "API key" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def edgectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that must succeed; it is outside of the groups."""
        command = (sys.executable, "-m", "edgeshard.cli.main", *arguments)
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done

    def tokens_per_s(self, deployment: str, prompt: str) -> float:
        """The rate of an answer of 200 tokens, as the head saw it."""
        done = self.edgectl(
            "generate", deployment, "--prompt", prompt, "--max-tokens", "200", "--stats"
        )
        found = re.search(r"([\d.]+) tokens/s", done.stderr)
        assert found is not None, done.stderr
        return float(found[1])


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with capped("container", LIMIT_BYTES) as memory, part_of_a_core("container", CORES) as core:
        if core is None:
            pytest.skip("this machine limits no group's share of a core")
        if (core / "cpu.shares").exists():
            # it gets its half core on a busy machine, too
            (core / "cpu.shares").write_text(str(64 * 1024))
        container = Container(tmp_path, memory, core)
        try:
            yield container
        finally:
            container.process.terminate()
            container.process.wait(60)


def test_the_demo_is_served_within_its_budget_and_near_its_plan(
    container: Container, record_property: Callable[[str, object], None]
) -> None:
    container.wait_ready()
    container.edgectl("profile", "--model", "fairy-tales")
    # Draft tokens make an answer faster than a plan that has not seen them can know.
    container.edgectl(
        "deploy", "plain", "--model", "fairy-tales", "--concurrency", "1", "--speculation", "off"
    )
    deployments = json.loads(container.edgectl("get", "deployments", "-o", "json").stdout)
    (plain,) = (each for each in deployments if each["spec"]["name"] == "plain")
    planned = 1 / plain["placement"]["predicted"]["time_per_token_s"]
    measured = statistics.median(container.tokens_per_s("plain", prompt) for prompt in PROMPTS)
    most = most_bytes(container.memory)
    figures = (
        f"planned {planned:.0f} tokens/s, measured {measured:.0f}; at most {most / 2**20:.0f} MiB"
    )
    record_property("figures", figures)
    assert LEAST_OF_PLAN < measured / planned < 1.25, figures

    (node,) = json.loads(container.edgectl("get", "nodes", "-o", "json").stdout)
    assert 0 < node["facts"]["memory_budget_bytes"] < LIMIT_BYTES
    kept = sum(
        stage["parameter_bytes"] + stage["kv_bytes_capacity"]
        for each in deployments
        for stage in each["stages"]
    )
    assert kept <= node["facts"]["memory_budget_bytes"]
    assert "oom_kill 0" in (container.memory / "memory.oom_control").read_text()
    assert most < LIMIT_BYTES, figures
