"""Chat templates and tokenizers of models, in a process of their own.

A template may take forever, and a tokenizer's library holds the interpreter for seconds while it reads a large file: no
daemon can have them in its own process. The process starts with the first question and ends with its daemon.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeshard.domain.chat import AnswerFormat, ChatPrompt, Conversation, GenerationDefaults, Marker, ToolFormat
from edgeshard.domain.errors import (
    ERROR_BY_CODE,
    EdgeShardError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedModelError,
)
from edgeshard.domain.ids import Digest

ANSWER_LIMIT_S = 120.0
"""Of real time, for what the limits of processor time in the process do not end."""
MOST_WAITING = 256
"""Questions, each of up to some MB."""
_LONGEST_LINE = 1 << 20
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")
_TOKEN_TYPE = "I"
"""Of `array`, as the worker has it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's small files by their names, and the digest by which the process remembers it."""

    digest: Digest
    paths: Mapping[str, Path]


class ChatProcess:
    """Asks the process, one question after the other; where it has ended, the next question starts another."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._closed = False
        self._asking: set[asyncio.Task[tuple[dict[str, Any], bytes]]] = set()

    @property
    def pid(self) -> int | None:
        """Of the process; None where there is none."""
        return None if self._process is None else self._process.pid

    async def prompt(self, model: ModelFiles, conversation: Conversation) -> ChatPrompt:
        """The conversation as tokens, by the model's chat template.

        Raises InvalidArgumentError naming the field at fault, such as `messages[2].content`; FailedPreconditionError
        for a model without a template or a tokenizer; UnsupportedModelError for a template that fails or does not end.
        """
        values, data = await self._ask(model, "prompt", conversation=asdict(conversation))
        format_values = values["format"]
        answer_format = AnswerFormat(
            **{
                **format_values,
                "tools": ToolFormat(format_values["tools"]),
                "markers": tuple(Marker(**marker) for marker in format_values["markers"]),
            }
        )
        return ChatPrompt(_tokens(data), answer_format, GenerationDefaults(**values["defaults"]))

    async def tokenize(self, model: ModelFiles, text: str, special: bool = True) -> tuple[int, ...]:
        """The ids of a text; `special` adds those that the tokenizer puts around it."""
        _, data = await self._ask(model, "tokenize", text=text, special=special)
        return _tokens(data)

    async def detokenize(self, model: ModelFiles, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises InvalidArgumentError naming `tokens`."""
        _, data = await self._ask(model, "detokenize", tokens=list(tokens))
        return data.decode()

    async def texts(self, model: ModelFiles, tokens: Sequence[int]) -> list[str]:
        """What each id reads within a text. Raises as `detokenize`."""
        _, data = await self._ask(model, "texts", tokens=list(tokens))
        texts: list[str] = json.loads(data)
        return texts

    async def close(self) -> None:
        """End the process. What still waits for it fails, and so does what is asked from now on."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _ask(self, model: ModelFiles, do: str, **values: Any) -> tuple[dict[str, Any], bytes]:
        if self._waiting >= MOST_WAITING:
            raise ResourceExhaustedError(
                f"{MOST_WAITING} prompts wait for their turn, the most that may: try again",
                reason="OVERLOADED",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            await self._turn.acquire()  # whoever leaves before is not asked for
        finally:
            self._waiting -= 1
        question = {
            "do": do,
            "model": model.digest,
            "files": {name: str(p) for name, p in model.paths.items()},
            **values,
        }
        # Whoever leaves before the answer must not leave it to the next one.
        task = asyncio.create_task(self._answer_to(question))
        self._asking.add(task)
        task.add_done_callback(self._answered)
        answer, data = await asyncio.shield(task)
        if "error" in answer:
            raise _error(answer["error"])
        return answer, data

    def _answered(self, task: asyncio.Task[tuple[dict[str, Any], bytes]]) -> None:
        self._asking.discard(task)
        self._turn.release()

    async def _answer_to(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if self._closed:
            raise _closing()
        process = self._process
        if process is None or process.returncode is not None:
            process = await _start()
            if self._closed:
                await _end(process)
                raise _closing()
            self._process = process
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                answer: dict[str, Any] = json.loads(await process.stdout.readuntil(b"\n"))
                return answer, await process.stdout.readexactly(answer["binary"])
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            if self._closed:
                raise _closing() from None
            self._process = None
            await _end(process)
            raise _ended() from None


def _closing() -> UnavailableError:
    return UnavailableError("the daemon is shutting down", reason="SHUTTING_DOWN", retry_after_s=2.0)


def _ended() -> UnsupportedModelError:
    return UnsupportedModelError(
        "chat_template: rendering the prompt took too much time or memory and was stopped; shorten the messages, or "
        "mend the model's chat_template.jinja and add it again",
        field="chat_template",
        reason="TEMPLATE_EXHAUSTED",
    )


async def _start() -> asyncio.subprocess.Process:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "edgeshard.chat.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
            # A template that broke out of its sandbox would find nothing here, and no core file holds a prompt.
            env={**environment, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"},
            start_new_session=True,  # a Ctrl-C at the daemon's terminal is for the daemon, which ends this process
        )  # fmt: skip
    except OSError as error:
        raise InternalError(f"the process for chat templates cannot be started: {error.strerror}") from None


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _tokens(data: bytes) -> tuple[int, ...]:
    tokens = array(_TOKEN_TYPE)
    tokens.frombytes(data)
    return tuple(tokens)


def _error(values: dict[str, Any]) -> EdgeShardError:
    kind = ERROR_BY_CODE.get(values["code"], InternalError)
    return kind(values["message"], field=values["field"], reason=values["reason"])
