"""Messages between a node and its process of matchers: a request as a line of JSON, an answer as bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from edgeshard.domain.requests.generation import Guide, GuideKind
from edgeshard.forms import OWN

OPEN_S, ADVANCE_S = 2.0, 1.0
"""Processor time that the process may take for such a request: beyond it, it ends."""
ANSWER = struct.Struct("<?dI")
"""Before an answer: whether it is a mask, seconds of processor time that it took, and its bytes. Otherwise it is the
text of a refusal."""


@dataclass(frozen=True, slots=True)
class Setup:
    """First: what the matchers are of. Without a `tokenizer`, a file, they are of bytes, and only good for a check."""

    tokenizer: str = ""
    vocab_size: int = 0
    eos_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Open:
    """A request's matcher behind the tokens of its answer so far; answered by the mask for the next."""

    request: int
    kind: str
    text: str
    answer: tuple[int, ...] = ()

    @property
    def guide(self) -> Guide:
        return Guide(GuideKind(self.kind), self.text)


@dataclass(frozen=True, slots=True)
class Advance:
    """The answer has one token more; answered by the mask for the next."""

    request: int
    token: int


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
