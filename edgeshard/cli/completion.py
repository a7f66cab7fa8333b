"""Names for the shell to complete, asked of the coordinator: quickly, and without a word where it is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

from edgeshard.cli.connect import Connect

if TYPE_CHECKING:
    from edgeshard.client import Client

_LIMIT_S = 1.0
"""The user waits for it at the prompt."""


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    async def ask(client: Client) -> Iterable[str]:
        return [node.name for node in await client.nodes()]

    return _asked(ctx, incomplete, ask)


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    async def ask(client: Client) -> Iterable[str]:
        return [model.name for model in await client.stored_models()]

    return _asked(ctx, incomplete, ask)


def deployments(ctx: typer.Context, incomplete: str) -> list[str]:
    async def ask(client: Client) -> Iterable[str]:
        return [found.spec.name for found in await client.deployments()]

    return _asked(ctx, incomplete, ask)


def served(ctx: typer.Context, incomplete: str) -> list[str]:
    """Deployments and models that answer; also a client, which may see nothing else, is told these."""

    async def ask(client: Client) -> Iterable[str]:
        return [name for model in await client.served_models() for name in (model.deployment, model.model)]

    return _asked(ctx, incomplete, ask)


def _asked(ctx: typer.Context, incomplete: str, ask: Callable[[Client], Awaitable[Iterable[str]]]) -> list[str]:
    async def work() -> Iterable[str]:
        async with asyncio.timeout(_LIMIT_S), _connect(ctx.find_root().params).client() as client:
            return await ask(client)

    try:
        found = asyncio.run(work())
    except Exception:
        # Anything that is said here would land in the middle of the line that is being typed.
        return []
    return sorted({name for name in found if name.startswith(incomplete)})


def _connect(params: dict[str, Any]) -> Connect:
    """From what stands in the line already: the command's own start has not run."""
    names = ("coordinator", "tls_ca", "tls_cert", "tls_key")
    return Connect(**{name: params.get(name) for name in names}, plaintext=params.get("plaintext") or None)
