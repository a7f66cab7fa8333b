"""edgectl get: lists."""

from __future__ import annotations

import typer

from edgeshard.cli.connect import connect_of, run
from edgeshard.cli.output import Output, OutputOption, show_list

app = typer.Typer(help="List boxes, models or deployments.", no_args_is_help=True)


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
