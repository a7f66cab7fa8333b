"""Values as JSON that every reader takes: JSON has no word for a number that is not finite."""

from __future__ import annotations

import json
import math
from typing import Any

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def json_text(value: Any) -> str:
    """The value as JSON without spaces. A number that is not finite becomes null."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
