"""edgectl dashboard: the way of this operator's browser to the site."""

from __future__ import annotations

import typer

from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text


def dashboard(context: typer.Context) -> None:
    """Print a link that opens the dashboard in a browser. It works once, within a minute. Keep it
    secret: its user has all rights of this operator.
    """
    link = ask(context, lambda client: client.dashboard_link())
    show_text(link.url)
    show_text(f"valid once, within {link.ttl_s:.0f} s", err=True)
