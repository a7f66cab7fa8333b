"""edgectl top: nodes, deployments, stages and links at work, as they are now."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import option, switch
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import FailedPreconditionError, extra_line

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.views import Look

BETWEEN_S = 2.0
"""Seconds between the two snapshots of a printed view: rates are for this time."""


def top(
    context: typer.Context,
    interval: Annotated[float, option("SECONDS", "Refresh every SECONDS.", min=0.2, max=60)] = 1.0,
    once: Annotated[bool, switch("--once", "Print the tables once and exit.")] = False,
) -> None:
    """Watch the site live: nodes and their memory, deployments, stages (rates, waits, KV), links
    and requests. WAITS is the share of the last seconds in which a stage had no step (bubbles).
    Arrow keys scroll, Tab selects the next table, p pauses, q quits. If stdout is not a terminal,
    print the tables once.
    """
    shown_once = once or not sys.stdout.isatty()
    if not shown_once:
        check_textual()

    async def work(client: Client) -> None:
        if shown_once:
            first = await look(client)
            await asyncio.sleep(BETWEEN_S)
            _print(await look(client), first)
            return
        from edgeshard.cli.render.top_view import TopView

        await TopView(lambda: look(client), client.target, interval).run_async()

    ask(context, work, endless=not shown_once)


def check_textual() -> None:
    """Raise FailedPreconditionError with the command that installs the missing package."""
    if find_spec("textual") is None:
        raise FailedPreconditionError(
            f"edgectl top needs the top extra: {extra_line('top')} (edgectl top --once does "
            "without)",
            reason="MISSING_EXTRA",
        )


async def look(client: Client) -> Look:
    """The site as it is now."""
    from edgeshard.process.clock import SystemClock
    from edgeshard.views import Look

    site = await client.site()
    deployments = await client.deployments()
    return Look(SystemClock().now(), site, deployments)


def _print(now: Look, before: Look) -> None:
    from edgeshard.cli.render.output import show_below
    from edgeshard.cli.render.top_rows import SHAPES, summary, tables

    show_text(summary(now))
    for shape, rows in zip(SHAPES, tables(now, before), strict=True):
        show_below(rows, shape.columns)
