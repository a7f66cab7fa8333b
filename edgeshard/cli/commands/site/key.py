"""edgectl key: API keys for the HTTP gateway."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import Column, Output, OutputOption, show_list, show_text, time_of

if TYPE_CHECKING:
    from edgeshard.domain.identity import ApiKey

_HINT = """
  curl URL/v1/models -H 'Authorization: Bearer {key}'
  OpenAI(base_url="URL/v1", api_key="{key}")      # Python: from openai import OpenAI

URL is what edgectl serve prints, or where the coordinator's --http-listen is, such as http://127.0.0.1:8000."""
"""For people. Only the line with the key itself contains the key."""

app = typer.Typer(help="Manage API keys of the HTTP gateway.", no_args_is_help=True)


@app.command(short_help="Create an API key and print it once.")
def create(
    context: typer.Context,
    name: Annotated[str, argument("NAME", "Name the key; quotas refer to it as key/NAME.")],
    models: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Let the key use only this deployment, or all deployments of this model; repeatable "
            "(default: all).",
            "--model",
        ),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        option(
            "N",
            "Allow at most N tokens per minute, prompt and answer together (default: no limit).",
            min=1,
        ),
    ] = None,
    requests: Annotated[
        int | None, option("N", "Allow at most N requests at a time (default: no limit).", min=1)
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Let the key read all metrics, for Prometheus.")
    ] = False,
) -> None:
    """Create an API key and print it to stdout. The site stores only its hash, so the key cannot be
    shown again."""
    _, key = ask(
        context,
        lambda client: client.create_key(
            name,
            tuple(models or ()),
            tokens_per_minute=tokens_per_minute,
            requests=requests,
            metrics=metrics,
        ),
    )
    show_text(key)
    show_text(f"key {name} is made; programs send it as `Authorization: Bearer KEY`", err=True)
    if sys.stderr.isatty():
        show_text(_HINT.format(key=key if sys.stdout.isatty() else "KEY"), err=True)


@app.command("list")
def list_keys(context: typer.Context, output: OutputOption = Output.TABLE) -> None:
    """List the keys and what they may use, without their secrets."""
    show_list(ask(context, lambda client: client.keys()), output, COLUMNS, lambda key: key.name)


@app.command()
def revoke(
    context: typer.Context, name: Annotated[str, argument("NAME", "Revoke the key of this name.")]
) -> None:
    """Revoke an API key and end its running requests."""
    ask(context, lambda client: client.revoke_key(name))
    show_text(f"key {name} is revoked", err=True)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


COLUMNS: list[Column[ApiKey]] = [
    Column("NAME", lambda key: key.name),
    Column("MODELS", lambda key: ",".join(key.models) or "all"),
    Column("TOKENS/MIN", lambda key: _number(key.tokens_per_minute), right=True),
    Column("REQUESTS", lambda key: _number(key.requests), right=True),
    Column("METRICS", lambda key: "all" if key.metrics else "-"),
    Column("MADE", lambda key: time_of(key.created_at)),
]
