"""edgectl label: the labels by which rules choose nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text
from edgeshard.domain.nodes.labels import labels_text, parse_changes

app = typer.Typer(help="Set or remove labels of a node.", no_args_is_help=True)


@app.callback()
def label() -> None:
    """Set or remove labels of a node."""


@app.command(short_help="Set or remove labels of a node.", no_args_is_help=True)
def node(
    context: typer.Context,
    name: Annotated[
        str, argument("NAME", "Label the node of this name or id.", autocompletion=completion.nodes)
    ],
    labels: Annotated[
        list[str], argument("KEY=VALUE|KEY-", "Set this label, or remove the label with this key.")
    ],
) -> None:
    """Set labels of a node with KEY=VALUE, and remove them with KEY-. They survive restarts. Rules
    of deployments select nodes by labels (`edgectl deploy --rule`). These labels override those in
    the agent's settings. A running deployment stays until it is placed again.
    """
    new_labels, removed = parse_changes(labels)
    labelled_node = ask(context, lambda client: client.label_node(name, new_labels, removed))
    show_text(f"node {labelled_node.name} has labels {labels_text(labelled_node.labels) or '-'}")
