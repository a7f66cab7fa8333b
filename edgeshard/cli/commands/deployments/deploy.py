"""edgectl deploy: place a model on the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import (
    argument,
    option,
    spec_file,
    switch,
    wait_timeout,
    with_option_groups,
)
from edgeshard.cli.commands.deployments.model import add_model
from edgeshard.cli.commands.spec_options import KEYS, flag_of, read_texts, spec_options
from edgeshard.cli.connect import ask
from edgeshard.cli.render.loading import DeployReporter
from edgeshard.cli.render.output import (
    TABLES,
    Output,
    OutputOption,
    show_fields,
    show_list,
    show_text,
    stderr_console,
)
from edgeshard.domain.deployments.deployment import joined_mistakes, parse_spec, spec_mistakes
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.storage.inputs import read_json, read_toml

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
    from edgeshard.importing.model_sources import Source

MEASURE_S = 10.0
"""The longest that a deployment waits for measurements, unless --measure sets another limit."""
_LOOK_EVERY_S = 1.0


@with_option_groups
def deploy(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    *,
    name: Annotated[str | None, argument("NAME", KEYS["name"].option.help)] = None,
    file: Annotated[
        Path | None, spec_file("Read the spec from a TOML or JSON file instead of options.")
    ] = None,
    options: Annotated[dict[str, Any], spec_options()],
    wait: Annotated[bool, switch("--wait/--no-wait", "Wait until the deployment is ready.")] = True,
    timeout: Annotated[float | None, wait_timeout("the deployment continues to load")] = None,
    measure: Annotated[
        float,
        option(
            "SECONDS", "Profile unmeasured idle nodes first, for up to SECONDS (0: skip).", min=0
        ),
    ] = MEASURE_S,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the placement, and deploy nothing.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Deploy a model. Give either --file, or NAME and --model. Without --layers, EdgeShard chooses
    nodes and layers from measurements. It uses what `edgectl profile` measured, and first measures
    idle nodes that have no measurement (--measure). If measurements are still missing, it estimates
    from data sheets or free memory, and prints a note.
    """
    from edgeshard.cli.render.views import DEPLOYMENT_COLUMNS, PLACED_COLUMNS

    elsewhere = model_source(options.get("model"))
    values = ({} if name is None else {"name": name}) | options
    spec = spec_of(file, values if elsewhere is None else values | {"model": elsewhere.name})
    if elsewhere is not None:
        add_model(context, options["model"])
    if dry_run:
        placements = ask(context, lambda client: client.plan_replicas(spec))
        for number, placement in enumerate(placements if output in TABLES else placements[:1]):
            show_text("\n" * (number > 0), nl=False)
            data = placement if len(placements) == 1 else placements
            show_list(placement.stages, output, PLACED_COLUMNS, lambda stage: stage.node_name, data)
            _show_prediction(placement, output)
        return
    deployments = ask(context, lambda client: _deployed(client, spec, wait, timeout, measure))
    first = deployments[0] if len(deployments) == 1 else None
    show_list(deployments, output, DEPLOYMENT_COLUMNS, lambda item: item.spec.name, first)
    if first is not None:
        _show_prediction(first.placement, output)


def model_source(model: str | None) -> Source | None:
    """The source that `--model` names outside the store, None if it is a name. Raises NotFoundError
    if there is none."""
    if model is None:
        return None
    from edgeshard.importing.model_sources import is_source, parse_source

    return parse_source(model) if is_source(model) else None


def spec_of(file: Path | None, options: dict[str, Any]) -> DeploymentSpec:
    """The spec of `--file`, or of options by key. Raises InvalidArgumentError naming the key or
    option at fault."""
    if file is not None:
        if options:
            flags = ", ".join(flag_of(key) for key in options)
            raise InvalidArgumentError(
                f"--file holds the whole spec: leave out {flags}", field="file"
            )
        return parse_spec(read_spec(file))
    values, mistakes = read_texts(options)
    for key in ("name", "model"):
        if key not in values:
            mistakes.insert(
                0,
                InvalidArgumentError(
                    f"{key} is missing: give it, or a spec with --file", field=key
                ),
            )
            values[key] = "missing"
    mistakes += spec_mistakes(values)
    if mistakes:
        raise joined_mistakes([_about_option(mistake) for mistake in mistakes], "\n       ")
    try:
        return parse_spec(values)
    except InvalidArgumentError as error:
        raise _about_option(error) from None


def _about_option(error: InvalidArgumentError) -> InvalidArgumentError:
    """The error with the option's name instead of the key's, if the message begins with it."""
    key = error.field.partition(".")[0]
    if key not in KEYS or not error.message.startswith(key):
        return error
    return type(error)(
        flag_of(key) + error.message.removeprefix(key), field=error.field, reason=error.reason
    )


def read_spec(file: Path) -> dict[str, Any]:
    """The mapping in a TOML file, or a JSON one when its name ends in .json."""
    read = read_json if file.suffix == ".json" else read_toml
    values = read(file, f"{file} is not a spec", "file", "INVALID_SPEC")
    if not isinstance(values, dict):
        raise InvalidArgumentError(
            f"{file} is not a spec: it holds no object", field="file", reason="INVALID_SPEC"
        )
    return values


async def _deployed(
    client: Client, spec: DeploymentSpec, wait: bool, timeout_s: float | None, measure_s: float
) -> Sequence[Deployment]:
    """The deployment, or all its replicas."""
    import asyncio

    console = stderr_console()
    with console.status(f"deploying {spec.name}") as status:
        if spec.allow_streaming and (first := await client.plan(spec)).streams:
            console.print(f"before it starts: {first.note}", markup=False)
        reporter = DeployReporter(status)
        try:
            deployment = await deploy_measured(
                client, spec, reporter, measure_s, wait=wait, timeout_s=timeout_s
            )
            deployments = (
                await client.replicas(spec.name) if deployment.spec.replica else [deployment]
            )
            for warning in await placed_kernel_warnings(client, deployments):
                console.print(warning, markup=False)
            return deployments
        except asyncio.CancelledError:
            # The answer may have been lost: only the coordinator knows whether the deployment
            # continues.
            console.print(interrupted(spec.name, reporter.begun), markup=False)
            raise


async def placed_kernel_warnings(client: Client, deployments: Sequence[Deployment]) -> list[str]:
    """Warnings about missing or slow kernels of the nodes that deployments are placed on, with a
    remedy."""
    from edgeshard.cli.render.kernel_views import kernel_warnings

    names = {stage.node_name for deployment in deployments for stage in deployment.placement.stages}
    return list(kernel_warnings(node for node in await client.nodes() if node.name in names))


async def deploy_measured(
    client: Client,
    spec: DeploymentSpec,
    reporter: DeployReporter,
    measure_s: float,
    *,
    wait: bool = True,
    timeout_s: float | None = None,
) -> Deployment:
    """Deploy, and report the measurements that precede it. Raises as `Client.deploy`."""
    import asyncio

    watching = asyncio.create_task(_watch_measuring(client, reporter)) if measure_s else None
    try:
        return await client.deploy(spec, wait, timeout_s, reporter.show, measure_s=measure_s)
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch_measuring(client: Client, reporter: DeployReporter) -> None:
    import asyncio
    from contextlib import suppress

    while not reporter.begun:
        await asyncio.sleep(_LOOK_EVERY_S)
        with suppress(EdgeShardError):  # the deployment itself reports errors
            reporter.measuring([str(node.name) for node in await client.nodes() if node.measuring])


def _show_prediction(placement: Placement, output: Output) -> None:
    from edgeshard.cli.render.views import placement_fields

    if output in TABLES:
        show_text()
        show_fields(placement_fields(placement))


def interrupted(name: str, begun: bool) -> str:
    """The words for a user who ended the waiting."""
    goes_on = "continues to load" if begun else "may continue to load"
    return (
        f"deployment {name} {goes_on}: `edgectl describe deployment {name}` shows how far it is, "
        f"`edgectl delete deployment {name}` ends it"
    )
