"""edgectl run: a model, from wherever it is to an answer."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.commands.deployments.deploy import interrupted, model_source, spec_of
from edgeshard.cli.commands.deployments.model import add_model
from edgeshard.cli.commands.requests.generate import generate, prompt_of, read_stdin
from edgeshard.cli.connect import ask
from edgeshard.cli.render.loading import DeployReporter
from edgeshard.cli.render.output import stderr_console
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from edgeshard.client import Client


def run(
    context: typer.Context,
    model: Annotated[
        str,
        argument(
            "MODEL",
            "Use this deployment, or this model of the store. ./DIR, FILE.gguf, OWNER/NAME of the "
            "Hub, ollama:NAME and "
            "lmstudio:NAME are added to the store first.",
            autocompletion=completion.models,
        ),
    ],
    prompt: Annotated[
        str | None,
        argument(
            "[PROMPT]", "Answer this prompt and exit; - reads stdin. Without it, start a chat."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        option("N", "Limit the answer to N tokens.", "--max-new-tokens", "--max-tokens", min=1),
    ] = None,
    timeout: Annotated[
        float | None,
        option(
            "SECONDS",
            "Wait at most SECONDS until the deployment is ready (default: no limit). Then exit "
            "with 6; the deployment "
            "continues to load.",
            min=0,
        ),
    ] = None,
) -> None:
    """Deploy a model if it is not deployed, then answer a prompt or start a chat. The deployment
    keeps running under the model's name; `edgectl delete deployment NAME` frees its memory.
    """
    source = model_source(model)
    if prompt is None and not sys.stdin.isatty():
        prompt = read_stdin()
    name = model
    if source is not None:
        name = source.name
        add_model(context, model)
    ask(context, lambda client: _served(client, name, timeout))
    if prompt is None:
        _chat(context, name)
    else:
        options: dict[str, Any] = (
            {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        )
        generate(context, name, prompt_of(prompt, None), **options)


async def _served(client: Client, name: str, timeout_s: float | None) -> None:
    """Until the deployment of this name, or the one of the model of this name, answers requests."""
    if any(name in (item.deployment, item.model) for item in await client.served_models()):
        return
    console = stderr_console()
    with console.status(f"deploying {name}") as status:
        reporter = DeployReporter(status)
        try:
            await _deployed(client, name, timeout_s, reporter)
        except asyncio.CancelledError:
            console.print(interrupted(name, reporter.begun), markup=False)
            raise


async def _deployed(
    client: Client, name: str, timeout_s: float | None, reporter: DeployReporter
) -> None:
    try:
        await client.deployment(name)
    except NotFoundError:
        await client.stored_model(name)  # its error explains how to add a missing model
        await client.deploy(
            spec_of(None, {"name": name, "model": name}),
            timeout_s=timeout_s,
            on_change=reporter.show,
        )
    else:
        await client.wait_ready(name, timeout_s, reporter.show)


def _chat(context: typer.Context, name: str) -> None:
    """Hand over to `edgectl chat`, with the global options as they are."""
    root = context.find_root()
    command = getattr(root.command, "get_command", lambda *_: None)(root, "chat")
    if command is None:
        raise InvalidArgumentError(
            "prompt is missing: give it after the model; - reads it from stdin", field="prompt"
        )
    with command.make_context("chat", [name], parent=root) as chat:
        command.invoke(chat)
