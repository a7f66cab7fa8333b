"""Events of the site as they happen."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from edgeshard.cli.render.output import Output
from edgeshard.cli.render.views import EVENT_COLUMNS
from edgeshard.cli.render.watch import Rows, check_lines, print_item
from edgeshard.domain.control.site_event import SiteEvent


async def follow(events: AsyncGenerator[SiteEvent, None], output: Output) -> None:
    """A line for each, until it ends or is left."""
    check_lines(output)
    rows = Rows(EVENT_COLUMNS)
    async with aclosing(events) as told:
        async for event in told:
            print_item(event, output, rows, lambda event: str(event.number))
            sys.stdout.flush()
