"""The guides of a stage's requests, or of a head's checks: each next mask is made while the next
step travels.

A matcher's state is a function of the answer's tokens. So a request can continue from them on
another node or in another matcher process.

The processor time of guides is limited. A request may use a grace, for reading its guide, plus a
fixed time for each token after it. Each requester (party) has a share of a core for everything that
is not cheap. A party over its share waits until the share has refilled, and others continue
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from edgeshard.chat.turns import Turns
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import Guide
from edgeshard_agent.guides.guide_messages import (
    ADVANCE_S,
    ANSWER,
    OPEN_S,
    Advance,
    Close,
    Message,
    Open,
    Path,
    Setup,
    to_line,
)

GRACE_S, TOKEN_S = 2.0, 0.02
"""Processor time of one request: at the beginning, and more with each token of its answer."""
CHEAP_S = 0.005
"""Processor time that a mask may take without being charged: masks of JSON schemas take a tenth of
it with 150,000 tokens.
"""
SHARE, BURST_S = 0.25, 5.0
"""A party's share of a core for expensive masks, and how much of it may be saved up."""
MOST_IDLE = 256
"""Parties that are remembered though they have all their share."""


@dataclass(slots=True)
class RequestBudget:
    """The processor time that one request's guide has used, in seconds."""

    used_s: float = 0.0
    tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.used_s > GRACE_S + TOKEN_S * self.tokens


@dataclass(slots=True)
class _Share:
    """`left_s` may be below zero: the cost of a mask is known only after it is made."""

    left_s: float
    at_s: float

    def come_in(self, now_s: float) -> float:
        self.left_s = min(BURST_S, self.left_s + SHARE * max(0.0, now_s - self.at_s))
        self.at_s = now_s
        return self.left_s


@dataclass(slots=True)
class Shares:
    """The share of each party that has used some. `now_s` is of a steady clock."""

    _used: dict[str, _Share] = field(default_factory=dict)

    def wait_s(self, party: str, now_s: float) -> float:
        """Seconds until a party may have a mask made; 0 if it may now."""
        share = self._used.get(party)
        return 0.0 if share is None else max(0.0, -share.come_in(now_s) / SHARE)

    def charge(self, party: str, used_s: float, now_s: float) -> None:
        """Charge a party for the processor time of a mask."""
        if used_s <= CHEAP_S:
            return
        share = self._used.setdefault(party, _Share(BURST_S, now_s))
        share.come_in(now_s)
        share.left_s -= used_s
        if len(self._used) > MOST_IDLE:
            self._used = {who: of for who, of in self._used.items() if of.come_in(now_s) < BURST_S}


log = structlog.get_logger()

Banned = npt.NDArray[np.bool_]
"""[vocab] tokens that must not come next."""

WAIT_S = 20.0
"""How long a request waits for a mask. A step that has to wait for it takes less time than one that
counts as hanging.
"""
ANSWER_S = 15.0
"""How long the process may take to answer. It ends itself by the processor time that it uses, long
before."""
MOST_FREE = 3
"""After this many tokens without a forced one, the scheduler does not wait for a guide. Within free
text each wait would cost time. At its end, forced tokens become known one step later, when the next
token is drawn."""
REMEMBERED = 16
"""Guides that were checked: an application sends the same ones again and again."""
TOO_MUCH = "it took too much time or memory; make it simpler"


class GuideError(Exception):
    """Why a guide led to no token. Holds nothing of the answer."""


class _EndedError(Exception):
    """The process is gone."""


@dataclass(eq=False, slots=True)
class _Making:
    """A path, or a check, that waits for its turn or is made."""

    party: str
    make: Callable[[], Path | None]
    future: Future[Any] = field(default_factory=Future)


class Guided:
    """One request: `banned` and `advance` take turns, and are called by one thread."""

    def __init__(
        self,
        guides: Guides,
        number: int,
        guide: Guide,
        answer: Sequence[int],
        party: int,
        forced: int,
    ) -> None:
        self.number = number
        self.guide = guide
        self.answer = list(answer)
        self.said = 0
        """How many of these its matcher knows."""
        self.most_forced = forced
        self._free = 0
        """Number of tokens in a row that had no forced token after them."""
        self._drawn = 0
        """How many forced tokens of the path were drawn."""
        self.may_be_late = party != 0
        self.party = str(party)
        self.budget = RequestBudget(tokens=len(answer))
        self._guides = guides
        self._was_late = False
        self._begin()

    def is_due(self, wait_s: float = 0.0) -> bool:
        """Whether `banned` knows by now, or shall wait no longer. One that was late last time is
        not waited for."""
        if not self._making.future.done() and not self._was_late and wait_s > 0:
            wait([self._making.future], wait_s)
        is_due = self._making.future.done() or time.monotonic() - self._began_s > WAIT_S
        self._was_late = not is_due
        return is_due

    def banned(self) -> Banned:
        """The banned tokens at the position after the answer so far. Raises GuideError if no token
        is allowed there."""
        try:
            path: Path = self._making.future.result(
                max(0.0, self._began_s + WAIT_S - time.monotonic())
            )
        except FutureTimeoutError:
            raise GuideError("it took too long; make it simpler") from None
        return self._guides.banned(path.masks[self._drawn])

    def forced(self, wait_s: float) -> tuple[int, ...]:
        """Tokens after the answer so far whose text the guide forces; only their cut is free. Empty
        if the guide does not know them within `wait_s` seconds."""
        path = self._known(wait_s if self._free < MOST_FREE else 0.0)
        self._free = self._free + 1 if path is None else 0
        return () if path is None else path.forced[self._drawn :]

    def advance(self, token: int) -> None:
        """The answer has one token more: find out what may follow it."""
        self.answer.append(token)
        if self._guides.is_end(token):
            return
        self.budget.tokens += 1
        path = self._known(0.0)
        if (
            path is not None
            and path.forced[self._drawn] == token
            and self._drawn + 1 < len(path.masks)
        ):
            self._drawn += 1
        else:
            self._begin()

    def _known(self, wait_s: float) -> Path | None:
        """The possible continuation, if there are forced tokens in it."""
        future = self._making.future
        if wait_s > 0 and self.most_forced and not future.done() and not self._was_late:
            wait([future], wait_s)
        if not future.done() or future.exception() is not None:
            return None
        path: Path = future.result()
        return path if path.forced else None

    def close(self) -> None:
        self._guides.end(self, self._making)

    def _begin(self) -> None:
        self._began_s, self._drawn = time.monotonic(), 0
        self._making = self._guides.begin(self)


class Guides:
    """All guides of one stage or head, with a thread and a process that begin with the first of
    them.

    The processor time of a guide is charged to its request and its party (`RequestBudget`,
    `Shares`); parties take turns.
    """

    def __init__(self, setup: Setup = Setup()) -> None:  # noqa: B008 - frozen
        self._setup = setup
        self._turns: Turns[_Making] = Turns(sys.maxsize, sys.maxsize)
        self._shares = Shares()
        self._ended: deque[int] = deque()
        """Requests whose matchers are no longer needed."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: _Process | None = None
        self._known: set[int] = set()
        """The requests whose matchers the process has."""
        self._accepted: deque[Guide] = deque(maxlen=REMEMBERED)
        self._last_number = 0
        self._closed = False

    def open(
        self, guide: Guide, answer: Sequence[int] = (), party: int = 0, forced: int = 0
    ) -> Guided:
        """The guide of an answer that has these tokens so far; `party` is the requester, 0 if
        unknown. At most `forced` forced tokens are searched. So many tokens that are `forced` are
        found at most."""
        self._last_number += 1
        return Guided(self, self._last_number, guide, answer, party, forced)

    def check(self, guide: Guide, party: str = "") -> Future[None]:
        """Done when the library has taken the guide; it raises InvalidArgumentError naming `guide`
        otherwise."""
        return self._put(_Making(party, partial(self._check, guide))).future

    def close(self) -> None:
        """End it, from any thread; a mask that is being made is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    # For `Guided`

    def is_end(self, token: int) -> bool:
        return token in self._setup.eos_tokens

    def begin(self, guided: Guided) -> _Making:
        return self._put(_Making(guided.party, partial(self._path_of, guided)))

    def banned(self, mask: bytes) -> Banned:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[
            : self._setup.vocab_size
        ]
        banned: Banned = allowed == 0
        return banned

    def end(self, guided: Guided, making: _Making) -> None:
        with self._changed:
            self._turns.remove(making.party, making)
            self._ended.append(guided.number)
            self._changed.notify()

    def _put(self, making: _Making) -> _Making:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="guides", daemon=True)
                self._thread.start()
            self._turns.put(making.party, 0, making)
            self._changed.notify()
        return making

    # On the thread

    def _work(self) -> None:
        while (making := self._next()) is not None:
            began_s, self._used_s = time.monotonic(), 0.0
            if making.future.set_running_or_notify_cancel():
                try:
                    making.future.set_result(making.make())
                except BaseException as error:  # raised again by the caller that waits for it
                    making.future.set_exception(error)
            with self._changed:
                now_s = time.monotonic()
                used_s = min(self._used_s, now_s - began_s)
                self._turns.charge(making.party, used_s)
                self._shares.charge(making.party, used_s, now_s)
        self._drop()

    def _next(self) -> _Making | None:
        """The work to do now, once there is some; None at the end."""
        while True:
            with self._changed:
                if self._closed:
                    return None
                ended, self._ended = self._ended, deque()
                if not ended:
                    now_s = time.monotonic()
                    if turn := self._turns.take(
                        lambda party: not self._shares.wait_s(party, now_s)  # noqa: B023
                    ):
                        return turn[1]
                    waits = [self._shares.wait_s(party, now_s) for party in self._turns.waiting()]
                    self._changed.wait(min(waits, default=None))
            for number in ended:
                self._forget(number)

    def _check(self, guide: Guide) -> None:
        if guide in self._accepted:
            return
        try:
            self._ask(Open(0, guide.kind, guide.text))
        except GuideError as error:
            raise InvalidArgumentError(
                f"guide: the {guide.kind} is refused: {error}",
                field="guide",
                reason="GUIDE_INVALID",
            ) from None
        self._forget(0)
        self._accepted.append(guide)

    def _path_of(self, guided: Guided) -> Path:
        if guided.budget.is_over:
            raise GuideError(TOO_MUCH)
        if self._process is not None and self._process.has_ended:
            self._drop()  # not by this request
        try:
            if guided.number in self._known:
                more = tuple(guided.answer[guided.said :])
                path = self._ask(Advance(guided.number, more, guided.most_forced))
            else:
                guide, answer = guided.guide, tuple(guided.answer)
                path = self._ask(
                    Open(guided.number, guide.kind, guide.text, answer, guided.most_forced)
                )
                self._known.add(guided.number)
        finally:
            guided.budget.used_s += self._used_s
        guided.said = len(guided.answer)
        return path

    def _ask(self, message: Message) -> Path:
        began_s = time.monotonic()
        try:
            self._process = self._process or _Process(self._setup)
            forced, self._used_s, answer = self._process.ask(message)
        except (_EndedError, OSError) as error:
            log.warning("guides_ended", why=str(error))
            # The process that knew its processor time is gone. On a busy node it differs much from
            # the elapsed time.
            self._used_s = min(
                time.monotonic() - began_s, OPEN_S if isinstance(message, Open) else ADVANCE_S
            )
            self._drop()
            raise GuideError(TOO_MUCH) from None
        if forced is None:
            raise GuideError(answer.decode())
        return Path.of(answer, forced)

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
            [sys.executable, "-P", "-m", "edgeshard_agent.guides.guide_process"],
            # it could quote an answer
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            bufsize=0,
            # a Ctrl-C at the agent's terminal is for the agent, whose end ends this process
            start_new_session=True,
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

    def ask(self, message: Message) -> tuple[int | None, float, bytes]:
        """Return the number of forced tokens of a path (None if it was refused), the seconds of
        processor time it took, and its bytes.

        Raises OSError or _EndedError when the process is gone.
        """
        until = time.monotonic() + ANSWER_S
        self.tell(message)
        is_path, used_s, size, forced = ANSWER.unpack(self._read(ANSWER.size, until))
        return (forced if is_path else None), used_s, self._read(size, until)

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
