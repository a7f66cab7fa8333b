"""Inputs made of other inputs. The same seed makes the same ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

LONGEST = 1 << 16
"""Bytes of an input."""
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**63, 10**9, 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("nan"), "", "x", "x" * 5000, "\ud800", "\x00", "..", "/etc/passwd", [], {},
    [0] * 50, [[[[]]]], {"": {}},
)  # fmt: skip


def mutated(
    random_: random.Random, corpus: Sequence[bytes], words: Sequence[bytes], is_json: bool
) -> bytes:
    """An input of the corpus, changed in a few places."""
    data = random_.choice(corpus)
    if is_json and random_.random() < 0.6:
        changed = _changed_json(random_, data, corpus)
        if changed is not None:
            data = changed
            if random_.random() < 0.8:
                return data[:LONGEST]
    content = bytearray(data)
    for _ in range(1 << random_.randrange(4)):
        _change(random_, content, corpus, words)
    return bytes(content[:LONGEST])


def _change(
    random_: random.Random, content: bytearray, corpus: Sequence[bytes], words: Sequence[bytes]
) -> None:
    at = random_.randrange(len(content) + 1)
    end = min(len(content), at + random_.choice((1, 1, 2, 4, 8, 64, 4096)))
    match random_.randrange(8):
        case 0 if content:
            content[min(at, len(content) - 1)] ^= 1 << random_.randrange(8)
        case 1:
            content[at:end] = random_.randbytes(end - at)
        case 2:
            content[at:at] = random_.choice(words)
        case 3:
            content[at:end] = random_.choice(words)
        case 4:
            del content[at:end]
        case 5:
            piece = bytes(content[at:end])
            content[at:at] = piece * random_.choice((1, 1, 2, 3, 50, 1000))
        case 6:
            other = random_.choice(corpus)
            start = random_.randrange(len(other) + 1)
            content[at:end] = other[start : start + random_.choice((4, 32, 256, 4096))]
        case _:
            size = random_.choice((1, 2, 4, 8))
            content[at : at + size] = random_.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * size


def _changed_json(  # noqa: C901 - a case for each change
    random_: random.Random, data: bytes, corpus: Sequence[bytes]
) -> bytes | None:
    """A JSON document with some values replaced, removed, repeated or taken from another; None if
    it is no JSON."""
    try:
        value = json.loads(data)
        other = json.loads(random_.choice(corpus))
    except (ValueError, RecursionError):
        return None
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places:
            return None
        holder, key = random_.choice(places)
        match random_.randrange(6):
            case 0 | 1:
                holder[key] = copy.deepcopy(random_.choice(_VALUES))
            case 2:
                del holder[key]
            case 3:
                there = _places(other)
                if there:
                    from_, at = random_.choice(there)
                    holder[key] = copy.deepcopy(from_[at])
            case 4:
                for _ in range(random_.choice((1, 3, 30, 200))):
                    holder[key] = (
                        [holder[key]]
                        if random_.random() < 0.5
                        else {"type": "Sequence", "a": holder[key]}
                    )
            case _:
                if isinstance(holder, list) and len(json.dumps(holder[key])) < 200:
                    holder.extend([holder[key]] * random_.choice((1, 10, 1000)))
                elif isinstance(holder, list):
                    holder.append(holder[key])
                else:
                    holder[
                        random_.choice((str(key) + "x", "auto_map", "type", "x" * 3000, "\ud800"))
                    ] = holder[key]
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError, MemoryError):  # the repeated value may be large itself
        return None


def _places(value: Any, most: int = 4000) -> list[tuple[Any, Any]]:
    """The places of values in a document: an object or a list, and the key."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < most:
        value = waiting.pop()
        if isinstance(value, dict | list):
            keys = list(value) if isinstance(value, dict) else list(range(min(len(value), 500)))
            found += [(value, key) for key in keys]
            waiting += [value[key] for key in keys]
    return found
