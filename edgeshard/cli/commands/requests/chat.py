"""edgectl chat: a conversation on the terminal, or one message from a pipe."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgeshard.cli.commands.command_options import argument, option, with_option_groups
from edgeshard.cli.commands.requests.generate import read_stdin, write_text
from edgeshard.cli.commands.requests.generation_options import CHAT_GENERATION, OPTIONS
from edgeshard.cli.connect import connect_of
from edgeshard.cli.render.output import show_text
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, InvalidArgumentError
from edgeshard.domain.requests.conversation import ChatFinished, ContentDelta, ReasoningDelta

if TYPE_CHECKING:
    from edgeshard.client import GenerateOptions, SyncClient

_PROMPT, _MORE = ">>> ", "... "
_BLOCK = '"""'
_HELP = """\
/clear         start a new conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/quit          leave (as Ctrl-D, or Ctrl-C twice)
To write several lines, end a line with \\ or write them between two lines of \"\"\". \
Ctrl-C stops an answer."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@with_option_groups
def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        argument(
            "[MODEL]",
            "Use this deployment, or this model if exactly one deployment serves it; optional if "
            "the site has only one "
            "deployment.",
        ),
    ] = None,
    *,
    options: Annotated[dict[str, Any], CHAT_GENERATION],
    system: Annotated[str, option("TEXT", "Set the system message.")] = "",
    timeout: Annotated[
        float | None,
        option(
            "SECONDS", "Cancel an answer that takes longer than SECONDS (default: no limit).", min=0
        ),
    ] = None,
) -> None:
    """Chat with a model. Piped input is one message. The conversation is not stored. If you leave
    out an option of sampling, it takes the value that the model recommends. If the model recommends
    none, it takes the default below.
    """
    generate_options = cast("GenerateOptions", {**_given(context, options), "timeout_s": timeout})
    try:
        with connect_of(context).sync_client() as client:
            talk = Talk(client, model or _only_model(client), generate_options, system)
            if sys.stdin.isatty():
                converse(talk)
            else:
                talk.answer(read_stdin())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _given(context: typer.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options on the command line."""
    names = {item.keyword: name for name, item in OPTIONS.items()}
    sources = {keyword: context.get_parameter_source(names[keyword]) for keyword in options}
    return {
        name: value
        for name, value in options.items()
        if (source := sources[name]) and source.name != "DEFAULT"
    }


def _only_model(client: SyncClient) -> str:
    served = [model.deployment for model in client.served_models()]
    if len(served) == 1:
        return served[0]
    if not served:
        raise FailedPreconditionError(
            "model: the site serves no model; deploy one first, as with `edgectl deploy`",
            field="model",
        )
    raise InvalidArgumentError(f"model: name one of {', '.join(sorted(served))}", field="model")


@dataclass
class Talk:
    """A conversation, and the means to continue it."""

    client: SyncClient
    model: str
    options: GenerateOptions
    system: str = ""
    history: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str) -> None:
        """Send a message, and write the answer as it arrives.

        An answer that Ctrl-C stops is kept as far as it arrived. If another reason left no answer,
        the user's message is dropped, too. Raises EdgeShardError and KeyboardInterrupt.
        """
        message = {"role": "user", "content": text}
        messages = [
            *([{"role": "system", "content": self.system}] if self.system else []),
            *self.history,
            message,
        ]
        pieces: list[str] = []
        try:
            self._write(messages, pieces)
        except KeyboardInterrupt:
            write_text("\n")
            self.history += [message, {"role": "assistant", "content": "".join(pieces)}]
            raise
        except EdgeShardError:
            if pieces:
                write_text("\n")
            raise
        self.history += [message, {"role": "assistant", "content": "".join(pieces)}]

    def _write(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        """Reasoning is only for people: programs read the answer."""
        shows_reasoning, thinks = sys.stdout.isatty(), False
        try:
            with contextlib.closing(
                self.client.chat(self.model, messages, **self.options)
            ) as events:
                for event in events:
                    if isinstance(event, ReasoningDelta) and shows_reasoning:
                        self._raw("" if thinks else _DIM)
                        thinks = True
                        write_text(event.text)
                    elif isinstance(event, ContentDelta):
                        self._raw(f"{_PLAIN}\n\n" if thinks else "")
                        thinks = False
                        pieces.append(event.text)
                        write_text(event.text)
                    elif isinstance(event, ChatFinished):
                        self._raw(_PLAIN if thinks else "")
                        thinks = False
                        write_text("\n")
        finally:
            # An answer that ends in the middle of its reasoning must not leave the terminal dim.
            self._raw(_PLAIN if thinks else "")

    @staticmethod
    def _raw(text: str) -> None:
        """Past the filter that keeps a model's control characters from the terminal."""
        sys.stdout.write(text)


def converse(talk: Talk) -> None:
    """Read, answer, and again, until the person leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its editing and the lines said before

    show_text(f"{talk.model}: /help lists the commands", err=True)
    interrupted = False
    while True:
        try:
            text = _read()
        except EOFError:
            show_text(err=True)
            return
        except KeyboardInterrupt:
            if interrupted:
                show_text(err=True)
                return
            interrupted = True
            show_text("\n(once more, Ctrl-D or /quit leaves)", err=True)
            continue
        interrupted = False
        if text.startswith("/") and "\n" not in text:
            if _command(talk, text):
                return
        elif text.strip():
            interrupted = _answer(talk, text)


def _answer(talk: Talk, text: str) -> bool:
    """Whether the user stopped the answer. An error is printed, and the conversation continues."""
    try:
        talk.answer(text)
    except KeyboardInterrupt:
        return True
    except EdgeShardError as error:
        show_text(f"error: {error.message}", err=True)
        if talk.history:
            show_text("       (/clear starts a new conversation)", err=True)
    return False


def _read() -> str:
    """One message, of one line or several. Raises EOFError and KeyboardInterrupt."""
    line = input(_PROMPT)
    if line.strip().startswith(_BLOCK):
        lines = [line.strip().removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(input(_MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(_MORE))
    return "\n".join(lines)


def _command(talk: Talk, text: str) -> bool:
    """Whether it was the last one."""
    word, _, rest = text.strip().partition(" ")
    match word:
        case "/quit" | "/exit":
            return True
        case "/clear":
            talk.history.clear()
        case "/system":
            talk.system = rest.strip()
        case "/help":
            show_text(_HELP, err=True)
        case _:
            show_text(f"{word} is not a command; /help lists them", err=True)
    return False
