"""edgectl delete: remove a deployment, a model, a node, or packed units of one."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import (
    DeploymentName,
    ModelName,
    NodeName,
    argument,
    switch,
    wait_timeout,
)
from edgeshard.cli.completion import NounGroup
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import Output, OutputOption, show_data, show_text

app = typer.Typer(
    cls=NounGroup,
    help="Remove a deployment, a model, a node, or weights on a node's disk.",
    no_args_is_help=True,
)


@app.command(short_help="Stop a deployment and free its memory.")
def deployment(
    context: typer.Context,
    name: DeploymentName,
    wait: Annotated[
        bool, switch("--wait/--no-wait", "Wait until every node has released it.")
    ] = True,
    timeout: Annotated[float | None, wait_timeout("the deletion continues")] = None,
    force: Annotated[
        bool, switch("--force", "Delete it even if a node does not release it.")
    ] = False,
) -> None:
    """Stop a deployment and free its memory on every node. Running requests end."""
    try:
        ask(context, lambda client: client.delete_deployment(name, wait, timeout, force=force))
    except typer.Exit:
        show_text(
            f"deployment {name} is still being deleted: `edgectl get deployments` shows when it is "
            "gone",
            err=True,
        )
        raise
    show_text(f"deployment {name} {'deleted' if wait else 'is being deleted'}")


@app.command(short_help="Remove a model that no deployment uses.")
def model(context: typer.Context, name: ModelName) -> None:
    """Remove a model from the coordinator's store. The command fails while a deployment uses the
    model."""
    ask(context, lambda client: client.delete_model(name))
    show_text(f"model {name} deleted")


@app.command(short_help="Remove a node from the site.")
def node(context: typer.Context, name: NodeName) -> None:
    """Remove a node from the site. Its agent stops, its certificate is refused, and deployments
    continue without it. `edgectl token create` lets the node join again.
    """
    ask(context, lambda client: client.remove_node(name))
    show_text(f"node {name} deleted")


@app.command(short_help="Remove packed units (files of weights) from a node's disk.")
def packed(
    context: typer.Context,
    node: Annotated[
        str,
        typer.Argument(
            metavar="NODE", help="Name or id of the node.", autocompletion=completion.nodes
        ),
    ],
    units: Annotated[
        list[str] | None,
        argument(
            "[UNIT]...",
            "Remove these units, by the ids that `edgectl describe node` lists.",
            show_default=False,
        ),
    ] = None,
    unused: Annotated[bool, switch("--unused", "Remove all units that are not in use.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove packed units of a node: files from which it loads weights. The node makes a unit again
    when it needs it. A unit that a stage or a standby uses stays. `edgectl describe node` lists the
    units.
    """
    from edgeshard.cli.render.output import human_bytes
    from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError

    if unused == bool(units):
        raise InvalidArgumentError(
            "give the ids of packed units, or --unused for all not in use", field="units"
        )

    packed_units = ask(context, lambda client: client.drop_packed(node, None if unused else units))
    removed_units = [unit for unit in packed_units if not unit.in_use]
    if output in (Output.JSON, Output.YAML):
        show_data(packed_units, output)
    else:
        freed = human_bytes(sum(unit.size_bytes for unit in removed_units))
        show_text(
            f"{len(removed_units)} packed unit{'s' * (len(removed_units) != 1)} of node {node} "
            f"deleted: {freed} freed"
        )
    if units_in_use := [
        f"{unit.id} ({unit.unit} of {unit.model_name or unit.model})"
        for unit in packed_units
        if unit.in_use
    ]:
        raise FailedPreconditionError(
            f"node {node} uses {', '.join(units_in_use)}; delete the deployment first",
            field="units",
            reason="PACKED_IN_USE",
        )
