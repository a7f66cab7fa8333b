"""edgectl demo: a whole site on this machine, telling a story."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import option, switch
from edgeshard.cli.commands.requests.generation_options import generation_option
from edgeshard.cli.connect import run
from edgeshard.cli.render.output import (
    Column,
    Output,
    human_bytes,
    human_seconds,
    print_table,
    show_data,
    show_text,
    table,
)
from edgeshard.domain.deployments.placement import ExplicitStage, PlacedStage, parse_layers
from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.requests.generation import Generation, Sampling
from edgeshard.local.cluster import LocalCluster
from edgeshard.process.extras import check_extras

if TYPE_CHECKING:
    from edgeshard.client import Client, Completion
    from edgeshard.domain.deployments.deployment import Deployment

NAME = "fairy-tales"
NODES = ("a", "b", "c")
# Memory for the KV cache: the demo runs one request, and one more that a curious user starts
# meanwhile.
_CONCURRENCY = 2


class DemoOutput(StrEnum):
    """Forms of `-o` on `edgectl demo`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """The story to show. `layers` () spreads the layers evenly over three nodes."""

    prompt: str
    max_tokens: int
    seed: int
    temperature: float
    layers: tuple[ExplicitStage, ...]
    output: DemoOutput


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The outcome. Seconds from the command's start to the deployment's readiness and to the first
    token."""

    completion: Completion
    startup_s: float
    first_token_s: float


def demo(  # noqa: PLR0913 - one parameter for each option
    prompt: Annotated[
        str, option("TEXT", "Begin the story with this text.", "--prompt", "-p")
    ] = "Once upon a time",
    max_tokens: Annotated[int, option("N", "Generate at most N tokens.", min=1)] = 160,
    seed: Annotated[int, generation_option("seed")] = 0,
    temperature: Annotated[float, generation_option("temperature")] = 0.8,
    layers: Annotated[str | None, option("a=0:4,b=4:8,c=8:12", "Place the layers by hand.")] = None,
    model_dir: Annotated[
        Path | None,
        option("DIR", "Use this local model directory instead.", exists=True, file_okay=False),
    ] = None,
    serve: Annotated[
        bool, switch("--serve", "Serve HTTP until Ctrl-C instead of telling a story.")
    ] = False,
    port: Annotated[
        int | None,
        option(
            "N",
            "With --serve, use this port; by default 8000 or the next free port.",
            min=0,
            max=65535,
        ),
    ] = None,
    output: Annotated[
        DemoOutput, typer.Option("--output", "-o", help="Choose the output format.")
    ] = DemoOutput.TABLE,
) -> None:
    """Start a coordinator and three nodes on this machine, split a model over them and stream a
    story. Everything runs in a temporary directory, which is removed at the end.
    """
    if serve:
        from edgeshard.cli.commands.site.serve import serve_demo

        return serve_demo(port, len(NODES))
    check_extras("edgectl demo", "agent", "coordinator")
    started_s = time.monotonic()
    # Checked before anything is started.
    Generation(prompt, max_tokens, Sampling(temperature=temperature, seed=seed)).validate()
    explicit = parse_layers(layers) if layers is not None else ()
    request = DemoRequest(prompt, max_tokens, seed, temperature, explicit, output)
    with (
        model_directory(model_dir) as directory,
        tempfile.TemporaryDirectory(prefix="edgeshard-demo-") as state,
    ):
        run(_demo(request, directory, Path(state), Narrator(started_s)))


@contextlib.contextmanager
def model_directory(model_dir: Path | None) -> Iterator[Path]:
    """The model's directory: the given one, or the model that ships inside the package."""
    if model_dir is not None:
        yield model_dir.resolve()
        return
    shipped = resources.files("edgeshard") / "demo_model"
    if not shipped.is_dir():
        raise NotFoundError(
            "this installation has no demo model; give another model with --model-dir DIR",
            field="model-dir",
            reason="NO_DEMO_MODEL",
        )
    with resources.as_file(shipped) as directory:
        yield directory


NO_KERNELS = (
    "the CPU kernels are missing, because no C++ compiler was there when EdgeShard was installed: "
    "computing takes "
    "several times longer. Install g++, then EdgeShard again (in a checkout: make setup)"
)


def has_kernels() -> bool:
    """Whether the agent of this installation has its compiled kernels, without importing it."""
    spec = importlib.util.find_spec("edgeshard_agent")
    return spec is None or any(
        (Path(place) / "ops" / "libedgeshard_ops.so").exists()
        for place in spec.submodule_search_locations or ()
    )


class Narrator:
    """Reports progress on stderr, with the seconds since the command started."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        show_text(
            f"{self.elapsed_s():5.1f} s  ", err=True, nl=False, dim=not os.environ.get("NO_COLOR")
        )
        show_text(text, err=True)


async def _demo(request: DemoRequest, model: Path, state: Path, narrator: Narrator) -> None:
    nodes = tuple(stage.node for stage in request.layers) or NODES
    narrator.say(
        f"starting a coordinator and {len(nodes)} nodes ({', '.join(nodes)}) as processes of this "
        "machine"
    )
    if not has_kernels():
        narrator.say(NO_KERNELS)
    cluster = LocalCluster(state, nodes, secure=True)
    try:
        # The coordinator's start takes one core; imports at the same time take none from the nodes
        # later.
        await asyncio.gather(cluster.start_coordinator(), asyncio.to_thread(_import_client))
        narrator.say(f"the coordinator listens on {cluster.address}; every node dials it")
        joining = asyncio.ensure_future(cluster.start_agents())
        try:
            async with cluster.client() as client:
                await _add_model(client, model, narrator)
                await joining
                narrator.say(f"nodes {', '.join(nodes)} have joined")
                deployment = await _deploy(client, request, nodes, narrator)
                result = await _tell(client, request, deployment, narrator)
            if request.output is DemoOutput.TABLE:
                show_result(result)
            else:
                show_data(demo_record(request, result), Output(request.output.value))
        finally:
            joining.cancel()
    finally:
        # Their state is thrown away, so a short grace is enough.
        await cluster.stop(grace_s=1.0)


def _import_client() -> None:
    import edgeshard.cli.commands.requests.generate
    import edgeshard.client  # noqa: F401


async def _add_model(client: Client, directory: Path, narrator: Narrator) -> None:
    await client.add_model(directory, NAME)
    stored = await client.stored_model(NAME)
    narrator.say(
        f"model {NAME} is in the coordinator's store: {stored.architecture}, {stored.layer_count} "
        "layers, "
        f"{stored.parameter_count / 1e6:.1f} M parameters, {human_bytes(stored.stored_bytes)}"
    )


async def _deploy(
    client: Client, request: DemoRequest, nodes: tuple[str, ...], narrator: Narrator
) -> Deployment:
    from edgeshard.domain.deployments.deployment import parse_spec

    stored = await client.stored_model(NAME)
    stages = request.layers or even_layers(stored.layer_count, nodes)
    for_whom = ", ".join(f"{stage.layers} on {stage.node}" for stage in stages)
    narrator.say(f"loading layers {for_whom}: each node fetches only its own")
    spec = parse_spec(
        {
            "name": NAME,
            "model": NAME,
            "source": stages[0].node,
            "dtype": "float32",
            "layers": stages,
            "concurrency": _CONCURRENCY,
        }
    )
    return await client.deploy(spec, timeout_s=120)


async def _tell(
    client: Client, request: DemoRequest, deployment: Deployment, narrator: Narrator
) -> DemoResult:
    from edgeshard.cli.commands.requests.generate import stream, write_text

    startup_s = narrator.elapsed_s()
    narrator.say(
        f"ready: {' -> '.join(stage.node_name for stage in deployment.placement.stages)} answer as "
        "one model"
    )
    echo = request.output is DemoOutput.TABLE
    if echo:
        show_text(err=True)
        write_text(request.prompt)
    completion = await stream(
        client,
        NAME,
        request.prompt,
        {
            "max_new_tokens": request.max_tokens,
            "seed": request.seed,
            "temperature": request.temperature,
        },
        echo=echo,
    )
    return DemoResult(completion, startup_s, startup_s + completion.ttft_s)


def even_layers(layer_count: int, nodes: tuple[str, ...]) -> tuple[ExplicitStage, ...]:
    """Contiguous ranges as equal as they can be, the longer ones first; no more nodes than
    layers."""
    count = min(len(nodes), layer_count)
    bounds = [0]
    for index in range(count):
        bounds.append(bounds[-1] + layer_count // count + (index < layer_count % count))
    text = ",".join(
        f"{node}={bounds[index]}:{bounds[index + 1]}" for index, node in enumerate(nodes[:count])
    )
    return parse_layers(text)


def demo_record(request: DemoRequest, result: DemoResult) -> dict[str, Any]:
    """The result as JSON types. `text` is the generated text; times are in seconds, sizes in
    bytes."""
    from edgeshard.cli.commands.requests.generate import placement_record

    completion = result.completion
    return {
        "prompt": request.prompt,
        "text": completion.text,
        "prompt_token_ids": list(completion.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "placement": placement_record(completion),
        "kv_bytes": [stage.kv_bytes for stage in completion.placement.stages],
        "stage_compute_ms": list(completion.stage_compute_ms),
        "ttft_s": completion.ttft_s,
        "inter_token_latency_s": completion.inter_token_latency_s,
        "tokens_per_s": completion.tokens_per_s,
        "startup_s": result.startup_s,
        "first_token_s": result.first_token_s,
    }


def show_result(result: DemoResult) -> None:
    """Print the table of nodes and the line of times."""
    completion = result.completion
    rows = list(zip(completion.placement.stages, completion.stage_compute_ms, strict=True))
    columns: list[Column[tuple[PlacedStage, float]]] = [
        Column("NODE", lambda row: row[0].node_name),
        Column("LAYERS", lambda row: str(row[0].layers)),
        Column("WEIGHTS", lambda row: human_bytes(row[0].parameter_bytes), right=True),
        Column("KV CACHE", lambda row: human_bytes(row[0].kv_bytes), right=True),
        Column("COMPUTE PER TOKEN", lambda row: f"{row[1]:.2f} ms", right=True),
    ]
    show_text()
    print_table(table(rows, columns))
    show_text()
    show_text(
        f"{len(completion.token_ids)} tokens: time to first token "
        f"{human_seconds(completion.ttft_s)}, "
        f"inter-token latency {human_seconds(completion.inter_token_latency_s)}, "
        f"{completion.tokens_per_s:.1f} tokens/s"
    )
    show_text(f"first token {result.first_token_s:.1f} s after the command started", err=True)
