"""edgectl describe: everything about one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from edgeshard.cli.commands.command_options import DeploymentName, ModelName, NodeName
from edgeshard.cli.completion import NounGroup
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    OutputOption,
    plain,
    show_below,
    show_fields,
    show_text,
    show_value,
)

if TYPE_CHECKING:
    from edgeshard.client import Client

app = typer.Typer(
    cls=NounGroup, help="Show the details of a node, model or deployment.", no_args_is_help=True
)


@app.command(short_help="Show a node: device, memory, stages, measurements.")
def node(context: typer.Context, name: NodeName, output: OutputOption = Output.TABLE) -> None:
    """Show a node, by name or id: its device, memory and stages, the packed units on its disk, and
    the measurements of it and of its links.
    """
    from edgeshard.cli.render.profile_views import (
        LINK_COLUMNS,
        link_rows,
        node_data,
        profile_text,
        unknown_fields,
    )
    from edgeshard.cli.render.views import PACKED_COLUMNS, STAGE_COLUMNS, node_fields, packed_text
    from edgeshard.domain.errors import EdgeShardError

    async def work(client: Client) -> None:
        details = await client.node_details(name)
        names = {node.node_id: str(node.name) for node in await client.nodes()}
        packed = None
        try:
            packed = await client.packed_units(name)
            says = packed_text(packed)
        except EdgeShardError as error:  # all else of a node is known also while it is away
            says = f"unknown: {error.message}"
        site_node = details.node
        _show(
            node_data(details, names) | {"packed": plain(packed)},
            site_node.name,
            output,
            node_fields(site_node) | {"Packed": says} | unknown_fields(details),
            [
                (site_node.stages, STAGE_COLUMNS),
                (packed or (), PACKED_COLUMNS),
                (link_rows(details.links, names), LINK_COLUMNS),
            ],
            ["\n".join(profile_text(stored)) for stored in details.profiles],
        )

    ask(context, work)


@app.command()
def model(context: typer.Context, name: ModelName, output: OutputOption = Output.TABLE) -> None:
    """Show a model of the store."""
    from edgeshard.cli.render.views import model_fields

    stored_model = ask(context, lambda client: client.stored_model(name))
    _show(stored_model, stored_model.name, output, model_fields(stored_model), [])


@app.command(short_help="Show a deployment: phase, settings, placement, counters.")
def deployment(
    context: typer.Context, name: DeploymentName, output: OutputOption = Output.TABLE
) -> None:
    """Show a deployment: its settings, its phase and the cause, the layers of each node, and the
    prediction. The output also shows the usual lengths of its requests, and whether another
    placement would suit these lengths better. Each node has counters: steps, tokens, idle share,
    waiting steps and KV cache in use. Nodes that stream weights or swap KV have counters for that,
    too. If the deployment is ready, the output also predicts, for each node, which node would
    replace it if it died and how long requests would pause. If a name has replicas, the output
    shows each of them.
    """
    from edgeshard.cli.render.views import (
        LOSS_COLUMNS,
        PLACED_COLUMNS,
        RUNNING_COLUMNS,
        deployment_fields,
        running_stages,
        tier_tables,
    )

    replicas = ask(context, lambda client: client.replicas(name, outlook=True))
    if output not in TABLES:
        show_value(
            replicas[0] if len(replicas) == 1 else replicas,
            output,
            [one.spec.name for one in replicas],
        )
        return
    for number, one in enumerate(replicas):
        show_text("\n" * (number > 0), nl=False)
        _show(
            one,
            one.spec.name,
            output,
            deployment_fields(one),
            [
                (one.placement.stages, PLACED_COLUMNS),
                (running_stages(one), RUNNING_COLUMNS),
                *tier_tables(one),
                (one.outlook.losses if one.outlook is not None else (), LOSS_COLUMNS),
            ],
        )


def _show(
    value: Any,
    name: str,
    output: Output,
    fields: Mapping[str, str],
    tables: Sequence[tuple[Sequence[Any], Sequence[Column[Any]]]],
    paragraphs: Sequence[str] = (),
) -> None:
    if output not in TABLES:
        show_value(value, output, [name])
        return
    show_fields(fields)
    for items, columns in tables:
        show_below(items, columns, output)
    for paragraph in paragraphs:
        show_text(f"\n{paragraph}")
