"""edgectl get: lists."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli.connect import connect_of, run
from edgeshard.cli.output import Output, OutputOption, show_list

app = typer.Typer(help="List boxes, models, deployments or the audit log.", no_args_is_help=True)


@app.command()
def nodes(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """List the boxes of the site and what they hold."""
    from edgeshard.cli.views import NODE_COLUMNS

    async def work() -> None:
        async with connect_of(context).client() as client:
            show_list(await client.nodes(), output, NODE_COLUMNS, lambda node: node.name)

    run(work())


@app.command()
def models(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """List the models in the coordinator's store."""
    from edgeshard.cli.views import MODEL_COLUMNS

    async def work() -> None:
        async with connect_of(context).client() as client:
            show_list(await client.stored_models(), output, MODEL_COLUMNS, lambda model: model.name)

    run(work())


@app.command(short_help="List the deployments, their phase and placement.")
def deployments(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """List the deployments, their phase and which box holds which layers."""
    from edgeshard.cli.views import DEPLOYMENT_COLUMNS

    async def work() -> None:
        async with connect_of(context).client() as client:
            found = await client.deployments()
            show_list(found, output, DEPLOYMENT_COLUMNS, lambda deployment: deployment.spec.name)

    run(work())


@app.command(short_help="List who changed the site, or was refused.")
def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000, help="The newest so many.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """List who changed the site, or was refused, the newest last."""
    from edgeshard.cli.views import AUDIT_COLUMNS

    async def work() -> None:
        async with connect_of(context).client() as client:
            show_list(await client.audit(limit), output, AUDIT_COLUMNS, lambda entry: entry.what)

    run(work())
