"""HPipe's test bed and its two models, as far as notes of the paper say and public sources fill in.

Nothing is fitted to the paper. Its reported results are in `ANCHORS`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.inputs.devices import Cluster, parse_cluster, with_bandwidth
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import ModelSpec, model_from_config

TESTBED = Path(__file__).parents[2] / "deploy" / "examples" / "hpipe-testbed.toml"
MACHINES = ("rtx", "p100")
"""The two computers of the test bed: the GPUs of one kind are in one of them."""
PROMPTS = 16
"""Number of prompts that are present at once when the rate is computed."""

_LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""The first LLaMA's paper, table 2; vocabulary and positions of its published config."""
_GPT3_2B = {
    "model_type": "gpt2",
    "n_embd": 2560,
    "n_layer": 32,
    "n_head": 32,
    "n_inner": 10240,
    "n_positions": 2048,
    "vocab_size": 50257,
}
"""The GPT-3 paper's table 2.1, "GPT-3 2.7B". Its sparse attention layers count as dense ones."""
CONFIGS = {"LLaMA-7B": _LLAMA_7B, "GPT3-2B": _GPT3_2B}
MODELS = tuple(CONFIGS)


@dataclass(frozen=True, slots=True)
class Anchors:
    """The paper's results as the notes give them: up to this many times the throughput, up to this
    much less energy."""

    speed_up: float = 2.28
    energy_saved: float = 0.682


ANCHORS = Anchors()


def model(name: str) -> ModelSpec:
    return model_from_config(name, CONFIGS[name])


def cluster(between_bps: float | None = None) -> Cluster:
    """The test bed, with another rate between its two computers if one is given."""
    found = parse_cluster(tomllib.loads(TESTBED.read_text(encoding="utf-8")))
    return found if between_bps is None else with_bandwidth(found, between_bps, MACHINES)


def problem(name: str, nodes: Cluster, objective: Objective) -> PlanProblem:
    """One prompt in a micro-batch: prompts of this length fill a step by themselves."""
    return PlanProblem(
        model=model(name),
        cluster=nodes,
        objective=objective,
        prompt_tokens=nodes.workload.prompt_tokens,
        new_tokens=nodes.workload.new_tokens,
        batch=1,
        concurrency=PROMPTS,
        dtype=nodes.dtype or DType.FLOAT16,
    )
