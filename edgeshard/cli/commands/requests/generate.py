"""edgectl generate: text from a deployment, as it arrives."""

from __future__ import annotations

import sys
from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgeshard.cli import completion
from edgeshard.cli.commands.command_options import argument, option, switch, with_option_groups
from edgeshard.cli.commands.requests.generation_options import GENERATION, GuideOptions
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import (
    Column,
    Output,
    human_seconds,
    plain,
    printable,
    show_data,
    show_text,
    stderr_console,
    table,
)
from edgeshard.domain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from edgeshard.client import Client, Completion, GenerateOptions


class TextOutput(StrEnum):
    """Forms of `-o` on commands that generate."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@with_option_groups
def generate(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    model: Annotated[
        str,
        argument(
            "MODEL",
            "Use this deployment, or this model if exactly one deployment serves it.",
            autocompletion=completion.served,
        ),
    ],
    prompt: Annotated[
        str | None, argument("[PROMPT]", "Continue this prompt; - reads stdin.")
    ] = None,
    *,
    options: Annotated[dict[str, Any], GENERATION],
    prompt_option: Annotated[
        str | None, option("TEXT", "Give the prompt as an option instead.", "--prompt", "-p")
    ] = None,
    request_id: Annotated[
        str, option("ID", "Name the request so that other processes can cancel it.")
    ] = "",
    timeout: Annotated[
        float | None,
        option(
            "SECONDS",
            "Cancel the request after SECONDS, and exit with 6 (default: no limit).",
            min=0,
        ),
    ] = None,
    stats: Annotated[bool, switch("--stats", "Print timings to stderr at the end.")] = False,
    output: Annotated[
        TextOutput, typer.Option("--output", "-o", help="Choose the output format.")
    ] = TextOutput.TEXT,
    guide: GuideOptions,
) -> None:
    """Generate text and print it token by token. Ctrl-C cancels the request on every node. If you
    leave out an option, it takes the default below, even if the model recommends another value;
    `edgectl chat` uses the model's.
    """
    call = {"guide": guide.guide(), "request_id": request_id, "timeout_s": timeout}
    generate_options = cast("GenerateOptions", {**options, **call})
    text = prompt_of(prompt, prompt_option)

    echo = output is TextOutput.TEXT
    completion = ask(
        context, lambda client: stream(client, model, text, generate_options, echo=echo)
    )
    if not echo:
        show_data(completion_record(completion), Output(output.value))
    else:
        prompt_rows = list(
            zip(completion.prompt_token_ids[1:], completion.prompt_logprobs, strict=False)
        )
        answer_rows = list(zip(completion.token_ids, completion.logprobs, strict=False))
        if prompt_rows or answer_rows:
            stderr_console().print(table([*prompt_rows, *answer_rows], _LOGPROBS))
    if stats:
        show_text(summary(completion), err=True)


def prompt_of(argument: str | None, option: str | None) -> str:
    """The prompt, however it was given. Raises InvalidArgumentError if there is none, or more than
    one."""
    if argument is not None and option is not None:
        raise InvalidArgumentError(
            "prompt: give it after the model or with --prompt, not both", field="prompt"
        )
    text = argument if option is None else option
    if text is None:
        raise InvalidArgumentError(
            "prompt is missing: give it after the model or with --prompt; - reads it from stdin",
            field="prompt",
        )
    return read_stdin() if text == "-" else text


def read_stdin() -> str:
    """The prompt on stdin, as it is. Raises InvalidArgumentError when it is not UTF-8, whatever the
    locale."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"prompt: stdin is not UTF-8 text (byte {error.start}); convert it first, as with "
            "iconv",
            field="prompt",
        ) from None


async def stream(
    client: Client, model: str, prompt: str, options: GenerateOptions, *, echo: bool
) -> Completion:
    """Run a request, with `echo` writing its text to stdout as it arrives, and return all of it."""
    from edgeshard.client.completion import CompletionBuilder
    from edgeshard.domain.requests.generation import Finished, Token
    from edgeshard.process.clock import SystemClock

    clock = SystemClock()
    wants_logprobs = options.get("logprobs", False) or options.get("top_logprobs", 0) > 0
    builder = CompletionBuilder(clock.now(), logprobs=wants_logprobs)
    try:
        async with aclosing(client.generate(model, prompt, **options)) as events:
            async for event in events:
                builder.add(event, clock.now())
                if echo and isinstance(event, Token | Finished):
                    write_text(event.text)
    finally:
        # Also when the text breaks off, so that an error message gets a line of its own.
        if echo and builder.begun:
            write_text("\n")
    return builder.build()


def write_text(text: str) -> None:
    """Write to stdout at once; a terminal gets no control characters from a model."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def completion_record(completion: Completion) -> dict[str, Any]:
    """A completion as JSON types, with the placement as nodes, layers and bytes."""
    record: dict[str, Any] = plain(completion)
    record["placement"] = placement_record(completion)
    record["tokens_per_s"] = completion.tokens_per_s
    return record


def placement_record(completion: Completion) -> list[dict[str, Any]]:
    """Each stage's node, its layers as `0:4` and its parameters' bytes."""
    return [
        {"node": stage.node_name, "layers": str(stage.layers), "bytes": stage.parameter_bytes}
        for stage in completion.placement.stages
    ]


def summary(completion: Completion) -> str:
    """One line of a request's times."""
    return (
        f"{len(completion.token_ids)} tokens ({completion.finish_reason}), "
        f"time to first token {human_seconds(completion.ttft_s)}, "
        f"inter-token latency {human_seconds(completion.inter_token_latency_s)}, "
        f"{completion.tokens_per_s:.1f} tokens/s"
    )


_LOGPROBS: list[Column[tuple[int, float]]] = [
    Column("TOKEN", lambda row: str(row[0]), right=True),
    Column("LOGPROB", lambda row: f"{row[1]:.4f}", right=True),
]
