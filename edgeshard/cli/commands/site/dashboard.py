"""edgectl dashboard: the way of this operator's browser to the site."""

from __future__ import annotations

import typer

from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text


def dashboard(context: typer.Context) -> None:
    """Print a link that opens the dashboard in a browser: once, and within a minute. Whoever has it may do there all
    that this operator may."""
    link = ask(context, lambda client: client.dashboard_link())
    show_text(link.url)
    show_text(f"good once, within {link.ttl_s:.0f} s", err=True)
