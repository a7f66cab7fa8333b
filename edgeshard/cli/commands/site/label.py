"""edgectl label: the labels by which rules choose nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.options import argument
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text
from edgeshard.domain.nodes.labels import labels_text, parse_changes

app = typer.Typer(help="Set and remove labels of a node.", no_args_is_help=True)


@app.callback()
def label() -> None:
    """Set and remove labels of a node."""


@app.command(short_help="Set and remove labels of a node.", no_args_is_help=True)
def node(
    context: typer.Context,
    name: Annotated[str, argument("NAME", "Name or id of the node.", autocompletion=completion.nodes)],
    labels: Annotated[list[str], argument("KEY=VALUE|KEY-", "A label to set, or the key of one to remove.")],
) -> None:
    """Set labels of a node with KEY=VALUE, and remove them with KEY-; they outlive restarts.

    Rules of deployments choose nodes by them (`edgectl deploy --rule`). They come before those of the agent's own
    settings. What is deployed already stays where it is until it is placed again.
    """
    given, removed = parse_changes(labels)
    found = ask(context, lambda client: client.label_node(name, given, removed))
    show_text(f"node {found.name} has labels {labels_text(found.labels) or '-'}")
