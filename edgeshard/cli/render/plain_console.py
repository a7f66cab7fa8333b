"""A console whose texts cannot steer the terminal. It has a module of its own because rich takes long to import."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from edgeshard.cli.render.output import OWN_LINES
from edgeshard.domain.ids import escaped


class PlainConsole(Console):
    """Rich's styles and live lines, and every text in them with escapes for control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(escaped(segment.text, OWN_LINES), segment.style)
