"""Names by which a command is found too: singular and plural, and the short ones that hands are used to."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

_SAME = (
    ("node", "nodes"),
    ("model", "models"),
    ("deployment", "deployments", "deploy"),
    ("event", "events"),
    ("key", "keys"),
)


class NounGroup(TyperGroup):
    """A group whose commands are nouns: each is found by any of its names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        subcommand = super().get_command(ctx, cmd_name)
        for names in _SAME if subcommand is None else ():
            if cmd_name in names:
                candidates = (TyperGroup.get_command(self, ctx, name) for name in names)
                subcommand = next((command for command in candidates if command is not None), None)
        return subcommand
