"""The guides of a stage's requests, or those that a head checks: each next mask is made while the next step travels.

A matcher's state is a function of the answer's tokens, so a request goes on from them, on another box as in another
process of matchers.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np
import numpy.typing as npt
import structlog

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.generation import Guide
from edgeshard_agent.guides.messages import ANSWER, Advance, Close, Message, Open, Setup, to_line

log = structlog.get_logger()

Banned = npt.NDArray[np.bool_]
"""[vocab] tokens that must not come next."""

WAIT_S = 20.0
"""How long a step waits for a mask: below what is taken for a hanging step."""
ANSWER_S = 15.0
"""How long the process may take to answer. It ends itself by the processor time that it uses, long before."""
REMEMBERED = 16
"""Guides that were checked: an application sends the same ones again and again."""
TOO_MUCH = "it took too much time or memory; make it simpler"


class GuideError(Exception):
    """Why a guide led to no token. Holds nothing of the answer."""


class _EndedError(Exception):
    """The process is gone."""


class Guided:
    """One request: `banned` and `advance` take turns, and are called by one thread."""

    def __init__(self, guides: Guides, number: int, guide: Guide, answer: Sequence[int]) -> None:
        self.number = number
        self.guide = guide
        self.answer = list(answer)
        self._guides = guides
        self._mask = guides.begin(self)

    def banned(self) -> Banned:
        """For the position behind the answer so far. Raises GuideError where there is no token for it."""
        try:
            return self._mask.result(WAIT_S)
        except FutureTimeoutError:
            raise GuideError("it took too long; make it simpler") from None

    def advance(self, token: int) -> None:
        """The answer has one token more: find out what may follow it."""
        self.answer.append(token)
        if not self._guides.is_end(token):
            self._mask = self._guides.begin(self)

    def close(self) -> None:
        self._mask.cancel()
        self._guides.end(self)


class Guides:
    """All guides of one stage or head, with a thread and a process that begin with the first of them."""

    def __init__(self, setup: Setup = Setup()) -> None:  # noqa: B008 - frozen
        self._setup = setup
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._process: _Process | None = None
        self._known: set[int] = set()
        """The requests whose matchers the process has."""
        self._accepted: deque[Guide] = deque(maxlen=REMEMBERED)
        self._last_number = 0
        self._closed = False

    def open(self, guide: Guide, answer: Sequence[int] = ()) -> Guided:
        """The guide of an answer that has these tokens so far."""
        self._last_number += 1
        return Guided(self, self._last_number, guide, answer)

    def check(self, guide: Guide) -> Future[None]:
        """Done when the library has taken the guide; it raises InvalidArgumentError naming `guide` otherwise."""
        return self._thread.submit(self._check, guide)

    def close(self) -> None:
        """End it, from any thread; a mask that is being made is not waited for."""
        self._closed = True
        self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)

    # For `Guided`

    def is_end(self, token: int) -> bool:
        return token in self._setup.eos_tokens

    def begin(self, guided: Guided) -> Future[Banned]:
        return self._thread.submit(self._banned, guided)

    def end(self, guided: Guided) -> None:
        if not self._closed:
            self._thread.submit(self._forget, guided.number)

    # On the thread

    def _check(self, guide: Guide) -> None:
        if guide in self._accepted:
            return
        try:
            self._mask(Open(0, guide.kind, guide.text))
        except GuideError as error:
            raise InvalidArgumentError(
                f"guide: the {guide.kind} is refused: {error}", field="guide", reason="GUIDE_INVALID"
            ) from None
        self._forget(0)
        self._accepted.append(guide)

    def _banned(self, guided: Guided) -> Banned:
        if self._process is not None and self._process.has_ended:
            self._drop()  # not by this request
        if guided.number in self._known:
            bits = self._mask(Advance(guided.number, guided.answer[-1]))
        else:
            bits = self._mask(Open(guided.number, guided.guide.kind, guided.guide.text, tuple(guided.answer)))
            self._known.add(guided.number)
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._setup.vocab_size]
        banned: Banned = allowed == 0
        return banned

    def _mask(self, message: Message) -> bytes:
        try:
            self._process = self._process or _Process(self._setup)
            is_mask, answer = self._process.ask(message)
        except (_EndedError, OSError) as error:
            log.warning("guides_ended", why=str(error))
            self._drop()
            raise GuideError(TOO_MUCH) from None
        if not is_mask:
            raise GuideError(answer.decode())
        return answer

    def _forget(self, number: int) -> None:
        self._known.discard(number)
        if self._process is not None:
            with contextlib.suppress(OSError):  # it has ended: the next mask finds out
                self._process.tell(Close(number))

    def _drop(self) -> None:
        process, self._process = self._process, None
        self._known.clear()
        if process is not None:
            process.end()


class _Process:
    """The process, from its start to its end; used by one thread."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgeshard_agent.guides.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,  # it could quote an answer
            bufsize=0,
            start_new_session=True,  # a Ctrl-C at the agent's terminal is for the agent, whose end ends this process
        )  # fmt: skip
        assert self._process.stdout is not None
        self._answers = select.poll()
        self._answers.register(self._process.stdout, select.POLLIN)
        self.tell(setup)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, message: Message) -> None:
        """Raises OSError when the process is gone."""
        assert self._process.stdin is not None
        rest = memoryview(to_line(message))
        while rest:
            rest = rest[self._process.stdin.write(rest) or 0 :]

    def ask(self, message: Message) -> tuple[bool, bytes]:
        """Whether the answer is a mask, and what it is. Raises OSError or _EndedError when the process is gone."""
        until = time.monotonic() + ANSWER_S
        self.tell(message)
        is_mask, size = ANSWER.unpack(self._read(ANSWER.size, until))
        return is_mask, self._read(size, until)

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        read = bytearray()
        while len(read) < size:
            if not self._answers.poll(1000 * max(0.0, until - time.monotonic())):
                raise _EndedError("it did not answer")
            part = os.read(self._process.stdout.fileno(), size - len(read))
            if not part:
                raise _EndedError(f"exit code {self._process.wait()}")
            read += part
        return bytes(read)
