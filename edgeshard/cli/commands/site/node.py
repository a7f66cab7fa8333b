"""edgectl node: actions on a node as a member of the site."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.options import argument, option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text
from edgeshard.domain.identity import Role

app = typer.Typer(help="Take a node's certificate away.", no_args_is_help=True)


@app.command(short_help="Refuse a certificate from now on.")
def revoke(
    context: typer.Context,
    name: Annotated[str, argument("NAME", "Of the node, or of whoever has the role.", autocompletion=completion.nodes)],
    role: Annotated[Role, option("ROLE", "agent, client or operator.")] = Role.AGENT,
) -> None:
    """Refuse every certificate that was made so far for NAME, also one that nobody has seen in use.

    A node leaves its deployments within a heartbeat; they go on without it. Requests of a client end. edgectl token
    create lets NAME in again.
    """
    ask(context, lambda client: client.revoke(role, name))
    show_text(f"{role} {name} revoked")
