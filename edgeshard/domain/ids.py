"""Distinct types for identifiers, and the only definition of a valid name."""

from __future__ import annotations

import math
import re
from itertools import islice
from typing import Annotated, NewType

from edgeshard.domain.errors import invalid

NodeId = NewType("NodeId", str)
NodeName = NewType("NodeName", str)
ModelName = NewType("ModelName", str)
DeploymentName = NewType("DeploymentName", str)
RequestId = NewType("RequestId", str)
OperationId = NewType("OperationId", str)
Digest = NewType("Digest", str)
"""A sha256 in lower-case hexadecimal."""
MAX_EPOCH = 2**63 - 1
"""The highest epoch that a message (uint64) and a row of SQLite (signed) can both hold."""
COUNTED_EPOCHS = 2**62
"""No coordinator counts this far: a higher epoch on its disk was falsified."""


def check_epoch(value: int, field: str) -> int:
    """Return an epoch from 0 to `MAX_EPOCH`; raises InvalidArgumentError naming `field`."""
    if not 0 <= value <= MAX_EPOCH:
        raise invalid(
            field, f"{value} is not an epoch: it must be between 0 and {MAX_EPOCH}", "INVALID_EPOCH"
        )
    return value


Epoch = NewType("Epoch", Annotated[int, check_epoch])
StepNumber = NewType("StepNumber", int)
RequestNumber = NewType("RequestNumber", int)
"""The head's number for a request, unique within (pipeline, epoch)."""

MAX_ID_LENGTH = 128
MAX_TEXT = 200
"""Characters of a text that a node sends for people."""
MAX_ESCAPED = 4
"""Characters of a text that are shown escaped."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that steer a terminal, begin a line or turn the direction of text (C0, C1, separators,
bidi controls)."""
_DIGEST = re.compile(r"[a-f0-9]{64}")


def check_name(text: str, field: str) -> str:
    """Return `text` when it is a valid name of a node, model or deployment.

    Names are never paths: lower-case letters, digits and `.`, `_`, `-` inside, at most 63
    characters.
    """
    if not _NAME.fullmatch(text) or ".." in text:
        remedy = (
            "use 1-63 lower-case letters, digits, '.', '_' or '-', beginning and ending with "
            "a letter or digit"
        )
        raise invalid(field, f"{text!r} is not a valid name: {remedy}", "INVALID_NAME")
    return text


def check_id(text: str, field: str) -> str:
    """Return an opaque id that is neither empty nor long, and plain; raises InvalidArgumentError
    naming `field`."""
    if not 0 < len(text) <= MAX_ID_LENGTH:
        raise invalid(
            field, f"must have 1 to {MAX_ID_LENGTH} characters, not {len(text)}", "INVALID_ID"
        )
    return check_plain(text, field)


def check_plain(text: str, field: str) -> str:
    """Return a text that a stranger sends and people see.

    Raises InvalidArgumentError naming `field` if it has control characters, new lines or characters
    that turn its direction."""
    match = _STEERING.search(text)
    if match is not None:
        why = f"holds U+{ord(match[0]):04X}, which steers whatever shows it: leave it out"
        raise invalid(field, why, "NOT_PLAIN")
    return text


def check_short(text: str, field: str) -> str:
    """Return a text of at most `MAX_TEXT` characters that is compared with a known one, such as an
    id; raises InvalidArgumentError naming `field` for a longer one."""
    if len(text) > MAX_TEXT:
        raise invalid(
            field, f"must have at most {MAX_TEXT} characters, not {len(text)}", "TOO_LONG"
        )
    return text


def cut_text(text: str, _: str) -> str:
    """At most `MAX_TEXT` characters of a text that a stranger sent, escaped: a check that changes
    the value.

    Escaping takes time, so a text with many characters that steer what shows it is cut before the
    fifth.
    """
    text = text[:MAX_TEXT]
    steering = [match.start() for match in islice(_STEERING.finditer(text), MAX_ESCAPED + 1)]
    if len(steering) > MAX_ESCAPED:
        text = text[: steering[-1]]
    return escaped(text) if steering else text


def finite(value: float, _: str) -> float:
    """A figure that a stranger sent, 0 if JSON has no such number: a check that changes the
    value."""
    return value if math.isfinite(value) else 0.0


def escaped(text: str, keep: str = "") -> str:
    """A text with control characters as escapes such as `\\x1b` and `\\u202e`, except those in
    `keep`: it cannot steer a terminal."""
    return _STEERING.sub(
        lambda match: match[0] if match[0] in keep else _escape(ord(match[0])), text
    )


def _escape(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


Text = Annotated[str, cut_text]
"""A text for people, of a message from a node."""
Figure = Annotated[float, finite]
"""A figure for people, of a message from a node."""


def check_digest(text: str, field: str = "sha256") -> Digest:
    """Return `text` as a Digest when it is 64 lower-case hexadecimal digits, so that it is safe as
    a file name."""
    if not _DIGEST.fullmatch(text):
        raise invalid(field, f"{text[:80]!r} is not a sha256", "INVALID_DIGEST")
    return Digest(text)
