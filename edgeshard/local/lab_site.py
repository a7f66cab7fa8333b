"""A lab: real daemons on this machine whose nodes and links emulate the ones in a lab file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeshard.local.cluster import LocalCluster

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.planning.simulation.lab import Lab, LabRun

VOCABULARY = 64
HIDDEN = 32
INNER = 48
_SEED = 7


@dataclass(frozen=True, slots=True)
class LabFigures:
    """Figures of a run: seconds to the first token, seconds between tokens, tokens a second over
    all streams."""

    ttft_s: float
    time_per_token_s: float
    throughput_tps: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run's prediction and its measurement; deviations are (predicted - measured) / measured."""

    placement: str
    mode: str
    streams: int
    predicted: LabFigures
    measured: LabFigures

    @property
    def deviation(self) -> dict[str, float]:
        """The deviation of each figure, by its name."""
        predicted, measured = asdict(self.predicted), asdict(self.measured)
        return {name: predicted[name] / measured[name] - 1 for name in predicted}

    def as_row(self) -> dict[str, Any]:
        """The run, its figures and their deviations as one flat object of JSON types."""
        row: dict[str, Any] = {
            "placement": self.placement,
            "mode": self.mode,
            "streams": self.streams,
        }
        for kind, values in (
            ("predicted", asdict(self.predicted)),
            ("measured", asdict(self.measured)),
        ):
            row |= {f"{kind}_{name}": value for name, value in values.items()}
        return row | {f"deviation_{name}": value for name, value in self.deviation.items()}


def make_stand_in(lab: Lab, directory: Path) -> None:
    """Write the small random Llama that the agents compute, with as many layers as the emulated
    model."""
    from edgeshard.architectures import KNOWN_MODELS, expected_tensors

    directory.mkdir(parents=True, exist_ok=True)
    layers = lab.model.layer_count
    config = {
        **KNOWN_MODELS["llama2-7b"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": lab.model.shape.max_context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": VOCABULARY - 1,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {tensor.name: tensor.shape for tensor in expected_tensors(config).values()}
    _write_safetensors(directory / "model.safetensors", shapes)


def _write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write random float32 tensors in the safetensors layout: length, JSON header, bytes."""
    generator = np.random.Generator(np.random.Philox(_SEED))
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    offset = 0
    for name, shape in shapes.items():
        values = np.ones(shape) if "norm" in name else generator.normal(0.0, 0.1, shape)
        data = values.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def lab_cluster(lab: Lab, lab_file: Path, directory: Path, *, stays: bool = False) -> LocalCluster:
    """The lab's processes, not started: an agent with one core for each emulated node.

    They end with this process unless the lab `stays`.
    """
    names = [node.name for node in lab.cluster.nodes]
    emulate = ["--emulate", str(lab_file.resolve())]
    return LocalCluster(directory, names, agent_arguments=emulate, threads=1, stays=stays)


async def measure(client: Client, lab: Lab, run: LabRun) -> LabFigures:
    """Deploy a run's placement, generate, and take it down again."""
    from edgeshard.domain.deployments.deployment import parse_spec

    work = lab.cluster.workload
    spec = {
        "name": "lab",
        "model": "stand-in",
        "source": run.stages[0].node,
        "dtype": "float32",
        "layers": run.placement,
        "mode": run.mode,
        "concurrency": run.streams,
        # As predicted: a head that chooses while it runs has not settled within a few tokens.
        "micro_batches": lab.predict(run).load.micro_batches,
        "max_context": work.prompt_tokens + work.new_tokens,
        "max_new_tokens": work.new_tokens,
    }
    await client.deploy(parse_spec(spec), timeout_s=180)
    try:
        began = time.perf_counter()
        streams = [
            stream(client, "lab", index, work.prompt_tokens, work.new_tokens)
            for index in range(run.streams)
        ]
        arrivals = await asyncio.gather(*streams)
    finally:
        await client.delete_deployment("lab")
    # Steady decoding begins once the last stream has its first token; before, prompts are still in
    # the way.
    steady = max(times[0] for times in arrivals)
    decoding = [[time for time in times if time >= steady] for times in arrivals]
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in decoding if len(times) > 1]
    total = sum(len(times) for times in arrivals)
    return LabFigures(
        # The two-phase formula's: until the last stream has its first token.
        ttft_s=max(times[0] for times in arrivals) - began,
        time_per_token_s=sum(gaps) / len(gaps) if gaps else 0.0,
        throughput_tps=total / (max(times[-1] for times in arrivals) - began),
    )


async def stream(
    client: Client, deployment: str, index: int, prompt_tokens: int, new_tokens: int
) -> list[float]:
    """Arrival times of the tokens of one request to a stand-in."""
    from edgeshard.domain.requests.generation import Token

    prompt = [(7 * index + 3 * position) % (VOCABULARY - 1) for position in range(prompt_tokens)]
    arrivals = []
    events = client.generate(deployment, prompt, max_new_tokens=new_tokens, ignore_eos=True)
    async with aclosing(events) as tokens:
        async for event in tokens:
            if isinstance(event, Token):
                arrivals.append(time.perf_counter())
    return arrivals


def predicted_of(lab: Lab, run: LabRun) -> LabFigures:
    """The planner's prediction of a run, in the figures that are measured."""
    prediction = lab.predict(run)
    return LabFigures(prediction.ttft_s, prediction.time_per_token_s, prediction.throughput_tps)


async def compare(client: Client, lab: Lab, run: LabRun) -> Comparison:
    """Predict a run, then measure it."""
    predicted = predicted_of(lab, run)
    return Comparison(
        run.placement, run.mode, run.streams, predicted, await measure(client, lab, run)
    )
