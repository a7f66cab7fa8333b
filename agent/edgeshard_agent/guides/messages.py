"""Messages between a node and its process of matchers: a request as a line of JSON, an answer as bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from edgeshard.domain.requests.generation import Guide, GuideKind

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
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Setup, Open, Advance, Close)}


def to_line(message: Message) -> bytes:
    return json.dumps({"is": type(message).__name__, **asdict(message)}).encode() + b"\n"


def from_line(line: bytes) -> Message:
    values: dict[str, Any] = json.loads(line)
    kind = _KINDS[values.pop("is")]
    message: Message = kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )
    return message
