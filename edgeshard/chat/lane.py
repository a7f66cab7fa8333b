"""A process that answers questions about models, one after the other, in a fair order of who
asks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edgeshard.chat.turns import Turns, overloaded
from edgeshard.domain.errors import (
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.forms import OWN

ANSWER_LIMIT_S = 120.0
"""Limit of real time, for work that the limits of processor time in the process do not end."""
MOST_WAITING = 256
"""Questions."""
MOST_WAITING_BYTES = 64 << 20
ENDED_COST_S = 5.0
"""The additional cost to an identity if the process ended at its question: others wait for the next
process."""
_LONGEST_LINE = 1 << 20
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
)

Answer = tuple[dict[str, Any], bytes]


@dataclass(slots=True, eq=False)
class _Question:
    """A question: a line of JSON, followed by parts in raw bytes. `exhausted` is the error if the
    process ended at it."""

    values: dict[str, Any]
    parts: Mapping[str, bytes]
    exhausted: Callable[[], EdgeShardError]
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: EdgeShardError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Lane:
    """One process, which starts with the first question; if it has ended, the next question starts
    another.

    `module` is what runs there (`edgeshard.chat.serving`); `niceness` is added to that of this
    process.
    """

    def __init__(self, module: str, niceness: int = 0) -> None:
        self._module = module
        self._niceness = niceness
        self._process: asyncio.subprocess.Process | None = None
        self._turns: Turns[_Question] = Turns(MOST_WAITING, MOST_WAITING_BYTES)
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def ask(
        self,
        identity: str,
        values: dict[str, Any],
        parts: Mapping[str, bytes],
        exhausted: Callable[[], EdgeShardError],
    ) -> Answer:
        """The answer of the process. Raises ResourceExhaustedError if too much waits,
        UnavailableError after `close`, `exhausted` if the question took the process too much, and
        the error in the answer."""
        if self._closed:
            raise _closing()
        question = _Question(values, parts, exhausted)
        size = sum(map(len, parts.values()))
        for victim in self._turns.put(identity, size, question):
            victim.fail(overloaded())
        self._begin()
        try:
            answer, data = await question.answer
        finally:
            # A caller that leaves before its turn is dropped.
            self._turns.remove(identity, question)
        if (error := answer.get("error")) is not None:
            raise OWN.read(EdgeShardError, error)
        return answer, data

    async def close(self) -> None:
        """End the process. Questions that still wait for it fail, and so do later ones."""
        self._closed = True
        for question in self._turns.drain():
            question.fail(_closing())
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    def _begin(self) -> None:
        if self._asking is None and (following := self._turns.take()) is not None:
            # A caller that leaves before the answer must not leave it to the next one.
            self._asking = asyncio.create_task(self._ask(*following))

    async def _ask(self, identity: str, question: _Question) -> None:
        loop = asyncio.get_running_loop()
        began, more = loop.time(), 0.0
        try:
            answer = await self._answer_to(question)
            if not question.answer.done():
                question.answer.set_result(answer)
        except EdgeShardError as error:
            more = ENDED_COST_S
            question.fail(error)
        finally:
            self._turns.charge(identity, loop.time() - began + more)
            self._asking = None
            self._begin()

    async def _answer_to(self, question: _Question) -> Answer:
        process = self._process
        if process is None or process.returncode is not None:
            process = await _start(self._module, self._niceness)
            if self._closed:
                await _end(process)
                raise _closing()
            self._process = process
        assert process.stdin is not None and process.stdout is not None
        sizes = {name: len(part) for name, part in question.parts.items()}
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                process.stdin.write(
                    json.dumps({**question.values, "parts": sizes}).encode() + b"\n"
                )
                for part in question.parts.values():
                    process.stdin.write(part)
                await process.stdin.drain()
                answer: dict[str, Any] = json.loads(await process.stdout.readuntil(b"\n"))
                return answer, await process.stdout.readexactly(answer["binary"])
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            if self._closed:
                raise _closing() from None
            self._process = None
            await _end(process)
            raise question.exhausted() from None


def _closing() -> UnavailableError:
    return UnavailableError(
        "the daemon is shutting down", reason="SHUTTING_DOWN", retry_after_s=2.0
    )


def text_too_costly() -> InvalidArgumentError:
    """The error for a text whose tokens ended the process."""
    return InvalidArgumentError(
        "prompt: the model's tokenizer needed too much time or memory for this text and was "
        "stopped; "
        "shorten it, or send token ids",
        field="prompt",
        reason="TEXT_TOO_COSTLY",
    )


async def _start(module: str, niceness: int) -> asyncio.subprocess.Process:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, str(niceness),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
            stderr=asyncio.subprocess.DEVNULL,  # a panic of the library could quote a prompt
            # A template that broke out of its sandbox would find nothing here, and no core file
            # holds a prompt.
            env={**environment, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"},
            # a Ctrl-C at the daemon's terminal is for the daemon, which ends this process
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise InternalError(
            f"the process for prompts cannot be started: {error.strerror}"
        ) from None


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
