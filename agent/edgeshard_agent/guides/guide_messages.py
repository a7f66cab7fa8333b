"""Messages between a node and its process of matchers: a request as a line of JSON, an answer as
bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.requests.generation import Guide, GuideKind
from edgeshard.forms import OWN

OPEN_S, ADVANCE_S = 2.0, 1.0
"""Processor time that the process may take for such a request: beyond it, it ends."""
ANSWER = struct.Struct("<?dII")
"""The header of an answer: whether it is a path, its seconds of processor time, its bytes, and the
number of forced tokens of the path. Forced tokens have 4 bytes each, after the masks. Otherwise it
is the text of a refusal."""


@dataclass(frozen=True, slots=True)
class Path:
    """The possible continuation of an answer. The `masks`, one bit for each token, hold what may
    follow the answer, and what may follow each of the `forced` tokens except the last. The forced
    tokens spell all text that the guide leaves no choice of, cut as the model cuts it. Another cut
    may be drawn."""

    masks: tuple[bytes, ...]
    forced: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        return b"".join(self.masks) + struct.pack(f"<{len(self.forced)}I", *self.forced)

    @classmethod
    def of(cls, data: bytes, forced: int) -> Path:
        size = (len(data) - 4 * forced) // max(1, forced)
        masks = tuple(data[place : place + size] for place in range(0, size * max(1, forced), size))
        return cls(masks, struct.unpack_from(f"<{forced}I", data, len(data) - 4 * forced))


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message: the tokenizer of the matchers. Without a `tokenizer`, a file, they are of
    bytes, and only good for a check.
    """

    tokenizer: str = ""
    vocab_size: int = 0
    eos_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Open:
    """Create a request's matcher after the tokens of its answer so far; the answer is a path with
    at most `forced` forced tokens."""

    request: int
    kind: str
    text: str
    answer: tuple[int, ...] = ()
    forced: int = 0

    @property
    def guide(self) -> Guide:
        return Guide(GuideKind(self.kind), self.text)


@dataclass(frozen=True, slots=True)
class Advance:
    """The answer has these tokens more; answered by a path."""

    request: int
    tokens: tuple[int, ...]
    forced: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Not answered."""

    request: int


Message = Setup | Open | Advance | Close
_MESSAGE: Any = Message


def to_line(message: Message) -> bytes:
    return OWN.to_text(_MESSAGE, message).encode() + b"\n"


def from_line(line: bytes) -> Message:
    message: Message = OWN.from_text(_MESSAGE, line)
    return message
