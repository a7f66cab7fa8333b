"""edgectl node: actions on a node as a member of the site."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text
from edgeshard.domain.identity import Role

app = typer.Typer(
    help="Revoke the certificates of a node, client or operator.", no_args_is_help=True
)


@app.command(short_help="Revoke the certificates of a node, client or operator.")
def revoke(
    context: typer.Context,
    name: Annotated[
        str,
        argument("NAME", "Name of the node, client or operator.", autocompletion=completion.nodes),
    ],
    role: Annotated[
        Role, option("ROLE", "Choose the role: agent, client or operator.")
    ] = Role.AGENT,
) -> None:
    """Revoke every certificate made so far for NAME, used or not. A node leaves its deployments
    within a heartbeat; they continue without it. Requests of a client end. `edgectl token create`
    lets NAME join again.
    """
    ask(context, lambda client: client.revoke(role, name))
    show_text(f"{role} {name} revoked")
