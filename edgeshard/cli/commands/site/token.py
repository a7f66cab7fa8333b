"""edgectl token: join tokens, each of which admits one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import Column, Output, OutputOption, show_list, show_text, time_of
from edgeshard.domain.identity import Role

if TYPE_CHECKING:
    from edgeshard.domain.identity import OpenToken

app = typer.Typer(help="Manage join tokens.", no_args_is_help=True)


@app.command(short_help="Print a command that joins a node, an application or an operator.")
def create(
    context: typer.Context,
    name: Annotated[
        str, option("NAME", "Name the node, the application or the operator.", "--node", "--name")
    ],
    role: Annotated[
        Role,
        option(
            "ROLE",
            "Choose what joins: agent (a node), client (an application) or operator (a person with "
            "edgectl).",
        ),
    ] = Role.AGENT,
    ttl: Annotated[str, option("TIME", "Let the token expire after TIME, such as 15m.")] = "15m",
    host: Annotated[
        str,
        option(
            "HOST",
            "Put this host name or IP address of the coordinator into the token, for the process "
            "to connect to "
            "(default: the coordinator's own address).",
        ),
    ] = "",
    discover: Annotated[
        bool,
        typer.Option(
            "--discover", help="Leave out the address: the process finds the site on its network."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the token.")] = False,
) -> None:
    """Create a join token and print the command that uses it. A token works once. Keep it secret
    until it is used or has expired.
    """
    from edgeshard.client.joining import invitation_to_text, line_without_edgeshard
    from edgeshard.process.config import parse_duration
    from edgeshard.rpc.tls import is_loopback, split_address

    ttl_s = parse_duration(ttl, "ttl")
    token = ask(context, lambda client: client.create_token(role, name, ttl_s, host))
    text = invitation_to_text(token.invitation.without_address() if discover else token.invitation)
    show_text(text if quiet else f"edgectl join {text}")
    bare = line_without_edgeshard(token)
    if bare and not quiet:
        show_text(
            "on a machine without EdgeShard (sudo in front has it installed as a "
            f"service):\n{bare}",
            err=True,
        )
    where, _ = split_address(token.coordinator)
    warning = (
        "; only from this machine: --host HOST names another address" if is_loopback(where) else ""
    )
    dials = "looks for the site on its network" if discover else f"dials {token.enrolment}{warning}"
    show_text(f"admits {token.principal} once, within {ttl}; it {dials}", err=True)


@app.command("list")
def list_tokens(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """List the valid tokens, without their secrets."""
    tokens = ask(context, lambda client: client.open_tokens())
    show_list(tokens, output, COLUMNS, lambda token: token.token_id)


@app.command()
def revoke(
    context: typer.Context,
    token_id: Annotated[
        str, argument("ID", "Revoke the token of this id, as `edgectl token list` prints it.")
    ],
) -> None:
    """Revoke a token, so that no process can join with it. A process that joined already stays;
    `edgectl node revoke` removes it.
    """
    ask(context, lambda client: client.revoke_token(token_id))
    show_text(f"token {token_id} was revoked", err=True)


COLUMNS: list[Column[OpenToken]] = [
    Column("ID", lambda token: token.token_id),
    Column("ROLE", lambda token: token.role),
    Column("NAME", lambda token: token.id),
    Column("CREATED", lambda token: time_of(token.created_at) if token.created_at else "-"),
    Column("EXPIRES", lambda token: time_of(token.expires_at)),
    Column("BY", lambda token: token.creator or "-"),
]
