"""The imports of an agent, and their time: it joins without torch, and serves our own blocks
without transformers."""

from __future__ import annotations

import json
import subprocess
import sys

LATER = {"torch", "transformers", "safetensors", "tokenizers"}
"""Modules that only computing needs."""
COMPILER = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
"""Half a second and tens of megabytes each, for nothing that an agent does."""
MODULES = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
SERVE = """
from edgeshard_agent.hosting import loading
from bench.quantisation import bits_per_byte, demo_stage
bits_per_byte(demo_stage("float32"), "Once upon a time there was a fox.")
"""


def modules_after(program: str) -> set[str]:
    output = subprocess.run(
        [sys.executable, "-c", program + MODULES], capture_output=True, text=True, timeout=120
    )
    assert output.returncode == 0, output.stderr
    return set(json.loads(output.stdout.splitlines()[-1]))


def test_what_an_agent_imports_before_it_joins_computes_nothing() -> None:
    modules = modules_after("import edgeshard_agent.entry, edgeshard_agent.daemon")
    assert "grpc" in modules and not modules & LATER


def test_all_that_computes_comes_with_its_tools_but_neither_transformers_nor_a_compiler() -> None:
    modules = modules_after("import edgeshard_agent.hosting.loading")
    assert "torch" in modules and "edgeshard_agent.model.stage" in modules
    assert not modules & ({"transformers"} | COMPILER)


def test_the_planner_comes_only_to_a_node_that_pretends_to_be_another() -> None:
    modules = modules_after("import edgeshard_agent.daemon, edgeshard_agent.hosting.loading")
    planner = (
        "solvers.solve",
        "solvers.subset",
        "solvers.general",
        "search.plan",
        "simulation.lab",
    )
    assert "edgeshard.planning.inputs.shapes" in modules
    assert not modules & {f"edgeshard.planning.{name}" for name in planner}


def test_a_family_on_our_own_blocks_is_served_without_transformers() -> None:
    modules = modules_after(SERVE.strip().replace("\n", "; "))
    assert "edgeshard_agent.model.fused" in modules
    assert not modules & ({"transformers"} | COMPILER)
