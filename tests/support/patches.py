"""Merge patches (RFC 7396), applied as a page applies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def patched(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with a patch."""
    after = dict(before)
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, Mapping):
            known = before.get(key)
            after[key] = patched(known if isinstance(known, Mapping) else {}, value)
        else:
            after[key] = value
    return after
