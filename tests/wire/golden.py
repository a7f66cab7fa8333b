"""Messages as an earlier version wrote them, with the values that they mean:
`python -m tests.wire.golden`.

The file is written once and then only grows: a message that an earlier version wrote must keep its
meaning. Run the program only to add messages that are new; it leaves those that are there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from edgeshard.domain.errors import EdgeShardError
from tests.wire.test_round_trips import PAIRS, arguments_of

NUMBERS = ("dtype", "reason")
"""Pairs for a number, which stands in no message of its own."""
GOLDEN = Path(__file__).parent / "golden.json"


def plain(value: Any) -> Any:
    """A value as JSON types, with the names of its fields."""
    if isinstance(value, Message):
        return value.SerializeToString(deterministic=True).hex()
    if isinstance(value, EdgeShardError):
        return [type(value).__name__, value.message, value.field, value.reason, value.retry_after_s]
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def written(message: Any) -> list[str] | str:
    """The bytes of a message, or of each of several."""
    return plain(message)  # type: ignore[no-any-return]


def examples() -> dict[str, list[dict[str, Any]]]:
    """Messages of each pair with all fields and with defaults, and the values that they mean."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (to_wire, _) in sorted(PAIRS.items()):
        if name in NUMBERS:
            continue
        every = [*arguments_of(to_wire, bare=False), *arguments_of(to_wire, bare=True)]
        found[name] = [
            {"message": written(to_wire(*arguments)), "value": plain(arguments)}
            for arguments in every
        ]
    return found


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found = {**examples(), **known}
    lines = (
        f"{json.dumps(name)}: {json.dumps(found[name], separators=(',', ':'))}"
        for name in sorted(found)
    )
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
