"""Names for the shell to complete, from the coordinator: quickly, and without output if it does not
answer. Also the names by which a command is found too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from edgeshard.cli.connect import Connect

if TYPE_CHECKING:
    from edgeshard.client import Client


from typer.core import TyperGroup

Item = TypeVar("Item")

_LIMIT_S = 1.0
"""The user waits for it at the prompt."""


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    return _asked(ctx, incomplete, lambda client: client.nodes(), lambda node: [node.name])


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    return _asked(
        ctx, incomplete, lambda client: client.stored_models(), lambda model: [model.name]
    )


def deployments(ctx: typer.Context, incomplete: str) -> list[str]:
    return _asked(
        ctx,
        incomplete,
        lambda client: client.deployments(),
        lambda deployment: [deployment.spec.name],
    )


def served(ctx: typer.Context, incomplete: str) -> list[str]:
    """Deployments and models that answer. A client may see only these."""
    return _asked(
        ctx,
        incomplete,
        lambda client: client.served_models(),
        lambda model: [model.deployment, model.model],
    )


def _asked(
    ctx: typer.Context,
    incomplete: str,
    ask: Callable[[Client], Awaitable[Iterable[Item]]],
    names: Callable[[Item], Iterable[str]],
) -> list[str]:
    import asyncio

    async def work() -> Iterable[Item]:
        async with asyncio.timeout(_LIMIT_S), _connect(ctx.find_root().params).client() as client:
            return await ask(client)

    try:
        items = asyncio.run(work())
    except Exception:
        # Any output here would appear in the middle of the line that is being typed.
        return []
    return sorted({name for item in items for name in names(item) if name.startswith(incomplete)})


def _connect(params: dict[str, Any]) -> Connect:
    """From the options already typed: the command's own start has not run."""
    names = ("coordinator", "tls_ca", "tls_cert", "tls_key")
    return Connect(
        **{name: params.get(name) for name in names}, plaintext=params.get("plaintext") or None
    )


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
