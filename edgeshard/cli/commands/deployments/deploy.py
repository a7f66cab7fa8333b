"""edgectl deploy: place a model on the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.deployments.model import add_model
from edgeshard.cli.commands.options import (
    AllowStreaming,
    Excluded,
    HeadQuantisation,
    KvDtype,
    Reserved,
    WaitTimeout,
    WeightsDtype,
    argument,
    model_option,
    node_option,
    option,
    quantise_option,
    spec_file,
    switch,
    with_option_groups,
)
from edgeshard.cli.connect import ask
from edgeshard.cli.render.loading import DeployReporter
from edgeshard.cli.render.output import TABLES, Output, OutputOption, show_fields, show_list, stderr_console
from edgeshard.domain.deployments.placement import Placement, parse_layers
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import MODEL_FORMATS
from edgeshard.storage.inputs import read_json, read_toml

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
    from edgeshard.importing.sources import Source


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """The options that say what the spec holds, by its keys; None or False where one was not given."""

    model: Annotated[
        str | None, model_option("A model of the store; ./DIR, FILE.gguf or OWNER/NAME is put there first.")
    ] = None
    source: Annotated[
        str | None, node_option("Node of the first layer; by default the first of --layers, or the best.")
    ] = None
    layers: Annotated[str | None, option("a=0:4,b=4:9", "Place it by hand.")] = None
    objective: Annotated[
        str | None, option("WHAT", "Plan for request, ttft, latency, throughput, energy or auto (default).")
    ] = None
    max_time_per_token_s: Annotated[
        float | None, option("SECONDS", "Plan for no slower a token of a request.", "--max-time-per-token")
    ] = None
    standby: Annotated[
        list[str] | None,
        node_option("Keep others' weights in its memory, to take over; may be repeated; auto chooses."),
    ] = None
    exclude: Excluded = None
    reserve: Reserved = None
    dtype: WeightsDtype = None
    kv_dtype: KvDtype = None
    quantisation: Annotated[
        list[str] | None,
        quantise_option(
            "Weights as small integers: int8, int4 or none; by default as stored. May be repeated for nodes.",
            "FORMAT|NODE=FORMAT",
        ),
    ] = None
    head_quantisation: HeadQuantisation = None
    max_context: Annotated[int | None, option("N", "Tokens of prompt and answer; 0 is the model's.")] = None
    max_new_tokens: Annotated[
        int | None, option("N", "Most new tokens of one request.", "--max-new-tokens", "--max-tokens")
    ] = None
    prompt_tokens: Annotated[int | None, option("N", "Plan for such prompts; by default, for those it has seen.")] = (
        None
    )
    new_tokens: Annotated[int | None, option("N", "Plan for such answers; by default, for those it has seen.")] = None
    concurrency: Annotated[int | None, option("N", "Requests the KV cache has room for.")] = None
    mode: Annotated[str | None, option("MODE", "no-bubbles (default), bubbles or sequential.")] = None
    micro_batches: Annotated[int | None, option("M", "Steps in flight that generate; 0 is the planner's choice.")] = (
        None
    )
    max_inter_token_latency_s: Annotated[
        float | None,
        option("SECONDS", "Longest that prompts may hold up a stream's next token.", "--max-inter-token-latency"),
    ] = None
    prefix_cache: Annotated[
        bool, switch("--prefix-cache", "Keep what requests of one client have in common at the beginning.")
    ] = False
    kv_overcommit: Annotated[
        bool, switch("--kv-overcommit", "Let more requests in than memory holds at their longest.")
    ] = False
    allow_streaming: AllowStreaming = False
    kv_swap_bytes: Annotated[
        str | None, option("SIZE", "KV of requests that gave way that a node may keep, such as 2GiB.")
    ] = None
    kv_swap_on_disk: Annotated[bool, switch("--kv-swap-on-disk", "Keep it in files instead of in memory.")] = False

    def given(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {key: value for key, value in values.items() if value is not None and value is not False}


@with_option_groups
def deploy(
    context: typer.Context,
    *,
    name: Annotated[str | None, argument("NAME", "Name of the deployment.")] = None,
    file: Annotated[Path | None, spec_file("The spec as TOML or JSON, instead of options.")] = None,
    options: SpecOptions,
    wait: Annotated[bool, switch("--wait/--no-wait", "Wait until it answers requests.")] = True,
    timeout: WaitTimeout = None,
    dry_run: Annotated[bool, switch("--dry-run", "Only print the placement.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Deploy a model: from --file, or NAME with --model.

    Without --layers the nodes and their layers are planned from what was measured (`edgectl profile`); where that is
    missing, from data sheets or free memory, and a note says so.
    """
    from edgeshard.cli.render.views import DEPLOYMENT_COLUMNS, PLACED_COLUMNS

    elsewhere = model_source(options.model)
    values = ({} if name is None else {"name": name}) | options.given()
    spec = spec_of(file, values if elsewhere is None else values | {"model": elsewhere.name})
    if elsewhere is not None and options.model is not None:
        add_model(context, options.model)
    if dry_run:
        placement = ask(context, lambda client: client.plan(spec))
        show_list(placement.stages, output, PLACED_COLUMNS, lambda stage: stage.node_name, placement)
    else:
        deployment = ask(context, lambda client: _deployed(client, spec, wait, timeout))
        show_list([deployment], output, DEPLOYMENT_COLUMNS, lambda item: item.spec.name, deployment)
        placement = deployment.placement
    _show_prediction(placement, output)


def model_source(model: str | None) -> Source | None:
    """The source that `--model` names outside the store, None for a name. Raises NotFoundError where there is none."""
    if model is None or not ("/" in model or model.lower().endswith(".gguf")):
        return None
    from edgeshard.importing.sources import parse_source

    return parse_source(model)


def spec_of(file: Path | None, options: dict[str, Any]) -> DeploymentSpec:
    """The spec of `--file`, or of options by key. Raises InvalidArgumentError naming the key or option at fault."""
    from edgeshard.domain.deployments.deployment import joined_mistakes, parse_spec, spec_mistakes

    if file is not None:
        if options:
            given = ", ".join(option_of(key) for key in options)
            raise InvalidArgumentError(f"--file holds the whole spec: leave out {given}", field="file")
        return parse_spec(read_spec(file))
    values, mistakes = _read_options(options)
    mistakes += spec_mistakes(values)
    if mistakes:
        raise joined_mistakes([_about_option(mistake) for mistake in mistakes], "\n       ")
    try:
        return parse_spec(values)
    except InvalidArgumentError as error:
        raise _about_option(error) from None


def _read_options(options: dict[str, Any]) -> tuple[dict[str, Any], list[InvalidArgumentError]]:
    """The spec's values, and what is wrong with options that are written in another form, or missing."""
    values: dict[str, Any] = {}
    mistakes: list[InvalidArgumentError] = []
    for key, value in options.items():
        try:
            values[key] = _READERS[key](value) if key in _READERS else value
        except InvalidArgumentError as error:
            mistakes.append(error)
    for key in ("name", "model"):
        if key not in values:
            mistakes.insert(0, InvalidArgumentError(f"{key} is missing: give it, or a spec with --file", field=key))
            values[key] = "missing"
    return values, mistakes


def _about_option(error: InvalidArgumentError) -> InvalidArgumentError:
    """The error with the option's name in place of the key's, where the message begins with it."""
    key = error.field.partition(".")[0]
    if not error.message.startswith(key):
        return error
    return type(error)(option_of(key) + error.message.removeprefix(key), field=error.field, reason=error.reason)


def option_of(key: str) -> str:
    """The option for a key of the spec."""
    named = {"name": "NAME", "quantisation": "--quantise"}
    return named.get(key, "--" + key.removesuffix("_s").replace("_", "-"))


def _quantisation(items: Sequence[str]) -> dict[str, str]:
    """`--quantise FORMAT` for every node that is not named, `--quantise NODE=FORMAT` for one."""
    from edgeshard.domain.deployments.deployment import EVERY_NODE

    found: dict[str, str] = {}
    for item in items:
        node, equals, text = item.rpartition("=")
        if text not in ("none", *MODEL_FORMATS) or (equals and (not node or text == "none")) or (node or "*") in found:
            raise InvalidArgumentError(
                f"--quantise {item!r}: give none, int8 or int4 once, and NODE=int8 or NODE=int4 once for a node",
                field="quantisation",
            )
        found[node or EVERY_NODE] = text
    return found


def _reserve(items: Sequence[str]) -> dict[str, int]:
    """`--reserve NODE=SIZE`, repeated."""
    from edgeshard.cli.commands.deployments.plan_inputs import sizes

    return {node: int(size) for node, size in sizes(items).items()}


def _swap_bytes(text: str) -> int:
    from edgeshard.process.config import parse_bytes

    return int(parse_bytes(text, "kv_swap_bytes"))


# Options that are written in another form than the spec's values.
_READERS: dict[str, Callable[[Any], Any]] = {
    "layers": parse_layers,
    "quantisation": _quantisation,
    "reserve": _reserve,
    "kv_swap_bytes": _swap_bytes,
}


def read_spec(file: Path) -> dict[str, Any]:
    """The mapping in a TOML file, or a JSON one when its name ends in .json."""
    read = read_json if file.suffix == ".json" else read_toml
    values = read(file, f"{file} is not a spec", "file", "INVALID_SPEC")
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"{file} is not a spec: it holds no object", field="file", reason="INVALID_SPEC")
    return values


async def _deployed(client: Client, spec: DeploymentSpec, wait: bool, timeout_s: float | None) -> Deployment:
    console = stderr_console()
    with console.status(f"deploying {spec.name}") as status:
        if spec.allow_streaming and (first := await client.plan(spec)).streams:
            console.print(f"before it starts: {first.note}", markup=False)
        reporter = DeployReporter(status)
        try:
            return await client.deploy(spec, wait, timeout_s, reporter.show)
        except asyncio.CancelledError:
            # The answer may have been under way: whether it goes on, only the coordinator knows.
            console.print(interrupted(spec.name, reporter.begun), markup=False)
            raise


def _show_prediction(placement: Placement, output: Output) -> None:
    from edgeshard.cli.render.views import prediction_fields

    fields = prediction_fields(placement)
    if fields and output in TABLES:
        typer.echo()
        show_fields(fields)


def interrupted(name: str, begun: bool) -> str:
    """The words for a user who ended the waiting."""
    goes_on = "goes on loading" if begun else "may go on loading"
    return (
        f"deployment {name} {goes_on}: `edgectl describe deployment {name}` shows how far it is, "
        f"`edgectl delete deployment {name}` ends it"
    )
