"""Reading a body within a budget of memory, in all and for each identity, and within a time.

The order is that of cost: place and memory before the first byte, size and parts as bytes arrive,
then the parser with the bounds of the fields. A large body is parsed in its turn, and the event
loop has most of its time between two. No thread could parse it in parallel, since the parser holds
the interpreter until it is done.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from edgeshard.chat.turns import Turns, overloaded
from edgeshard.domain.errors import (
    CancelledRequestError,
    DeadlineError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.identity import shown_identity
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.errors import refusal_of

MOST_BODY_BYTES = 16 << 20
"""The most bytes of a request's body, also decoded: the longest prompt, also with each letter as an
escape."""
MOST_OF_ONE_BYTES = 32 << 20
"""The most bytes of one identity's bodies that are read or parsed."""
MOST_BYTES = 96 << 20
"""The most bytes of all bodies that are read or parsed."""
ALWAYS_BYTES = 1 << 20
"""The bytes that an identity may have beyond that, so that others' bodies do not lock it out."""
LEAST_BYTES = 64 << 10
"""The least bytes that a body counts as, since this many may be buffered before it is checked."""
BODY_LIMIT_S = 120.0
GRACE_S = 10.0
LEAST_BPS = 16 << 10
"""The bytes a second at which a body must arrive after the grace."""
MOST_PARTS = 1 << 15
"""The most lists, objects and fields of a body. Each costs up to 2 us of the interpreter's lock."""
MOST_ITEMS = 1 << 18
"""The most commas of a body outside its texts: token ids, for example. Each costs up to 0.4 us."""
LARGE_BYTES = 256 << 10
"""The bytes above which a body is parsed in its turn: this many take a millisecond, the longest
body 100."""
REST = 3.0
"""The pause after a large body, in times of its parsing."""
MAX_PIECE_BYTES = 256 << 10
"""The most bytes of a compressed body that are decoded before others have their turn."""
_MOST_WAITING = 1 << 10
_GZIP = ("gzip", "x-gzip")

FormT = TypeVar("FormT", bound=BaseModel)
PlaceCheck = Callable[[str, int], None]
"""A call as `Backend.check_place`."""


@dataclass(slots=True)
class BodyBudget:
    """The bytes of bodies that are held, by identity. Pure."""

    most: int = MOST_BYTES
    most_of_one: int = MOST_OF_ONE_BYTES
    total: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)

    def take(self, identity: str, size: int) -> None:
        """Count `size` more bytes of an identity's body.

        Raises ResourceExhaustedError if the identity would have too many, UnavailableError if all
        together would.
        """
        own_bytes = self._sizes.get(identity, 0) + size
        # Without keys everyone is one identity, which has all there is.
        most = self.most_of_one if identity else self.most
        if own_bytes > most:
            raise ResourceExhaustedError(
                f"body: requests of {shown_identity(identity) or 'everyone together'} that are "
                f"being read have {most} "
                "bytes, the limit: send it again when one has been read",
                field="body",
                reason="TOO_MANY_BODIES",
                retry_after_s=1.0,
            )
        if self.total + size > self.most and own_bytes > ALWAYS_BYTES:
            raise UnavailableError(
                f"body: all requests that are being read have {self.most} bytes, the limit: send "
                "it again",
                field="body",
                reason="TOO_MANY_BODIES",
                retry_after_s=1.0,
            )
        self._sizes[identity] = own_bytes
        self.total += size

    def give_back(self, identity: str, size: int) -> None:
        """Count `size` bytes less."""
        self.total -= size
        self._sizes[identity] -= size
        if not self._sizes[identity]:
            del self._sizes[identity]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The most that a body may have: bytes, also decoded, and seconds from its beginning to its
    end."""

    max_bytes: int
    max_s: float

    def check_size(self, size: int) -> None:
        """Raise InvalidArgumentError if `size` bytes are too many."""
        if size > self.max_bytes:
            raise InvalidArgumentError(
                f"the body has more than {self.max_bytes} bytes",
                field="body",
                reason="BODY_TOO_LARGE",
            )

    def patience_s(self, received: int) -> float:
        """The seconds from a body's beginning by which more must follow, once `received` bytes are
        there."""
        return min(self.max_s, GRACE_S + received / LEAST_BPS)


KEYED = BodyLimits(MOST_BODY_BYTES, BODY_LIMIT_S)
"""The limits of a body whose sender showed a key."""
STRANGER = BodyLimits(64 << 10, GRACE_S)
"""Those of a body whose sender has shown nothing; its address is then its identity."""


class PartCounter:
    """A counter of what a JSON text has outside its strings, fed piece by piece. Pure.

    A string costs the parser little however long it is; a list, an object, a field or an item costs
    much.
    """

    def __init__(self) -> None:
        self.parts = 0
        self.items = 0
        self._has_letters = False
        self._is_inside = False
        self._cut = b""
        """A backslash at the end of a piece, whose character is in the next one."""

    def feed(self, piece: bytes) -> None:
        """Count a piece, unless there were too many parts before."""
        if self._is_over:
            return
        piece = self._cut + piece
        slashes = len(piece) - len(piece.rstrip(b"\\"))
        self._cut = b"\\" if slashes % 2 else b""
        if self._cut:
            piece = piece[:-1]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        runs = piece.split(b'"')
        outside = b"".join(runs[self._is_inside :: 2])
        self._is_inside ^= len(runs) % 2 == 0
        self.parts += sum(map(outside.count, (b"{", b"[", b":")))
        self.items += outside.count(b",")
        self._has_letters = self._has_letters or b"N" in outside or b"I" in outside

    @property
    def _is_over(self) -> bool:
        return self.parts > MOST_PARTS or self.items > MOST_ITEMS

    def check(self) -> None:
        """Raise InvalidArgumentError for too many parts, and for NaN or Infinity, which JSON lacks.

        It is called at the end: a client that is still sending would not read a refusal.
        """
        if self._is_over:
            raise InvalidArgumentError(
                f"the body has too many parts: at most {MOST_PARTS} lists, objects and fields, and "
                f"{MOST_ITEMS} items; "
                "send less at once",
                field="body",
                reason="TOO_MANY_PARTS",
            )
        if self._has_letters:
            raise InvalidArgumentError(
                "the body is not JSON: it has NaN or Infinity", reason="INVALID_JSON"
            )


@dataclass(slots=True, eq=False)
class _Large:
    """A body that waits to be parsed."""

    body: bytearray
    form: type[BaseModel]
    done: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def parse(self) -> None:
        if self.done.done():  # whoever wanted it has left
            return
        try:
            self.done.set_result(parse(self.body, self.form))
        except Exception as error:  # whoever waits raises it
            self.done.set_exception(error)


class Bodies:
    """The bodies of one gateway."""

    def __init__(self) -> None:
        self._budget = BodyBudget()
        self._reading: dict[str, int] = {}
        self._turns: Turns[_Large] = Turns(_MOST_WAITING, MOST_BYTES)
        self._resting = False

    @property
    def held_bytes(self) -> int:
        return self._budget.total

    def reading(self, identity: str) -> int:
        """The requests of an identity that want a place and whose bodies are on their way."""
        return self._reading.get(identity, 0)

    @contextmanager
    def place(self, identity: str, check_place: PlaceCheck | None) -> Iterator[None]:
        """A place held while a body is read; None is for a request without one. Raises as
        `check_place` does."""
        if check_place is None:
            yield
            return
        check_place(identity, self.reading(identity))
        self._reading[identity] = self.reading(identity) + 1
        try:
            yield
        finally:
            self._reading[identity] -= 1
            if not self._reading[identity]:
                del self._reading[identity]

    @contextmanager
    def room(self, identity: str, declared: int) -> Iterator[Callable[[int], None]]:
        """The memory for a body that declares `declared` bytes; call the returned function with the
        bytes so far.

        Both raise as `BodyBudget.take` does.
        """
        reserved_bytes = max(LEAST_BYTES, declared)
        self._budget.take(identity, reserved_bytes)

        def grow(size: int) -> None:
            nonlocal reserved_bytes
            if size > reserved_bytes:
                more = max(size - reserved_bytes, LEAST_BYTES)
                self._budget.take(identity, more)
                reserved_bytes += more

        try:
            yield grow
        finally:
            self._budget.give_back(identity, reserved_bytes)

    async def parsed(self, identity: str, body: bytearray, form: type[FormT]) -> FormT:
        """The body as `form`, in its turn if it is large. Raises as `parse` does."""
        if len(body) <= LARGE_BYTES:
            return parse(body, form)
        large = _Large(body, form)
        for victim in self._turns.put(identity, len(body), large):
            victim.done.set_exception(overloaded())
        self._go_on()
        try:
            return cast(FormT, await large.done)
        finally:
            self._turns.remove(identity, large)

    def _go_on(self) -> None:
        if self._resting or (following := self._turns.take()) is None:
            return
        identity, large = following
        loop = asyncio.get_running_loop()
        began = loop.time()
        large.parse()
        took = loop.time() - began
        self._turns.charge(identity, took)
        self._resting = True
        loop.call_later(REST * took, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._go_on()


async def read_body(
    request: Request,
    form: type[FormT],
    check_place: PlaceCheck | None = None,
    *,
    stranger: str | None = None,
) -> FormT:
    """The body as `form`; `check_place` refuses a caller that may have no place for it.

    The sender is the request's caller, whose right is checked once the body is there, or
    `stranger`: the address of a caller without credentials. Raises InvalidArgumentError naming the
    field or the header Content-Encoding, and DeadlineError for a body that does not arrive. Raises
    ResourceExhaustedError and UnavailableError if there is no place or no memory for it, and as
    `Caller.check` does.
    """
    bodies: Bodies = request.scope["state"]["bodies"]
    identity = caller_of(request).identity if stranger is None else f"address/{stranger}"
    limits = KEYED if stranger is None else STRANGER
    # in a form that the server has checked
    declared = int(request.headers.get("content-length", 0))
    limits.check_size(declared)
    decoder = _decoder(request)
    with bodies.place(identity, check_place), bodies.room(identity, declared) as grow:
        read = await bodies.parsed(identity, await _body_of(request, decoder, limits, grow), form)
    if stranger is None:
        caller_of(request).check()
    return read


def parse(body: bytearray, form: type[FormT]) -> FormT:
    """The body as `form`, its parts counted already. Raises InvalidArgumentError naming the
    field."""
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        refusal = refusal_of(error)
    except RecursionError:
        refusal = InvalidArgumentError("the body is nested too deep", reason="INVALID_JSON")
    # Not raised above: its context would hold pydantic's error and the body, in a cycle that gc
    # does not see.
    raise refusal


class Gunzip:
    """A decoder of a gzip body of one member."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The bytes that `data` adds, at most `MAX_PIECE_BYTES` at a time. Raises
        InvalidArgumentError."""
        is_full = True
        while data or is_full:
            try:
                piece = self._decoder.decompress(data, MAX_PIECE_BYTES)
            except zlib.error:
                raise _bad_gzip("the body is not gzip") from None
            if self._decoder.unused_data:
                raise _bad_gzip("something follows the end of the gzip body")
            data = self._decoder.unconsumed_tail
            is_full = len(piece) == MAX_PIECE_BYTES
            yield piece

    def finish(self) -> None:
        """Raise InvalidArgumentError for a body that is cut off."""
        if not self._decoder.eof:
            raise _bad_gzip("the gzip body is cut off")


def _decoder(request: Request) -> Gunzip | None:
    """The decoder of the body; None if it is not encoded. Raises InvalidArgumentError for an
    unknown encoding."""
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in _GZIP:
        return Gunzip()
    raise InvalidArgumentError(
        f"Content-Encoding {encoding[:40]!r} is not supported here: send the body as it is, or as "
        "gzip",
        field="content-encoding",
        reason="UNSUPPORTED_ENCODING",
    )


def _bad_gzip(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Content-Encoding: {what}", field="content-encoding", reason="INVALID_GZIP"
    )


async def _body_of(
    request: Request, decoder: Gunzip | None, limits: BodyLimits, grow: Callable[[int], None]
) -> bytearray:
    """The decoded body. Its size and parts are bounded as it arrives, its time by the bytes that
    were received."""
    body = bytearray()
    counter = PartCounter()
    received = 0
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began + limits.patience_s(0)) as limit:
            async for part in request.stream():
                received += len(part)
                limits.check_size(received)
                for piece in (part,) if decoder is None else decoder.pieces(part):
                    limits.check_size(len(body) + len(piece))
                    grow(len(body) + len(piece))
                    counter.feed(piece)
                    body += piece
                    if decoder is not None:
                        await asyncio.sleep(0)
                limit.reschedule(began + limits.patience_s(received))
    except TimeoutError:
        raise DeadlineError(
            f"the body arrived too slowly: send at least {LEAST_BPS} bytes a second, and all of it "
            "within "
            f"{limits.max_s:g} s",
            field="body",
            reason="BODY_TOO_SLOW",
        ) from None
    except ClientDisconnect:
        raise CancelledRequestError("the client disconnected", reason="CLIENT_LEFT") from None
    if decoder is not None:
        decoder.finish()
    counter.check()
    return body
