"""Differences between two values of JSON, as a merge patch (RFC 7396). Pure.

Objects are merged key by key, and null removes a key; so no object of a picture has a null for a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def difference(before: Json, after: Json) -> dict[str, Any]:
    """The patch that turns `before` into `after`; {} if they are equal. Identical objects are not compared."""
    changed: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old_value = before.get(key)
        if value is old_value and key in before:
            continue
        if isinstance(value, Mapping) and isinstance(old_value, Mapping):
            if inner := difference(old_value, value):
                changed[key] = inner
        elif key not in before or value != old_value:
            changed[key] = value
    return changed
