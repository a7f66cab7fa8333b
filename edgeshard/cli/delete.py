"""edgectl delete: remove a deployment, a model or a box."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.connect import connect_of, run
from edgeshard.cli.nouns import NounGroup

app = typer.Typer(cls=NounGroup, help="Remove a deployment, a model or a box.", no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.nodes)]
ModelName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.models)]
DeploymentName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.deployments)]


@app.command(short_help="Stop a deployment and free its memory.")
def deployment(
    context: typer.Context,
    name: DeploymentName,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until every box let go of it.")] = True,
    timeout: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Longest wait.")] = None,
) -> None:
    """Stop a deployment and free its memory on every box; requests that are running end."""

    async def work() -> None:
        async with connect_of(context).client() as client:
            await client.delete_deployment(name, wait, timeout)

    try:
        run(work())
    except typer.Exit:
        typer.echo(
            f"deployment {name} goes on being deleted: `edgectl get deployments` shows when it is gone", err=True
        )
        raise
    typer.echo(f"deployment {name} {'deleted' if wait else 'is being deleted'}")


@app.command(short_help="Remove a model that no deployment uses.")
def model(context: typer.Context, name: ModelName) -> None:
    """Remove a model from the coordinator's store; refused while a deployment uses it."""

    async def work() -> None:
        async with connect_of(context).client() as client:
            await client.delete_model(name)

    run(work())
    typer.echo(f"model {name} deleted")


@app.command(short_help="Take a box out of the site.")
def node(context: typer.Context, name: NodeName) -> None:
    """Take a box out of the site: its agent stops, its certificate is refused, deployments go on without it.

    edgectl token create lets it in again.
    """

    async def work() -> None:
        async with connect_of(context).client() as client:
            await client.remove_node(name)

    run(work())
    typer.echo(f"box {name} deleted")
