"""Files that an operator names, read up to a limit and parsed, with a typed error for every
fault."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.storage.forms import JSON_VALUES_LIMIT, json_values

INPUT_LIMIT_BYTES = 16 << 20
TOML_LIMIT_BYTES = 2 << 20
"""Ten thousand nodes have a tenth of it; Python reads a megabyte of TOML a second."""


def read_input(
    path: Path, what: str, field: str, reason: str = "", limit_bytes: int = INPUT_LIMIT_BYTES
) -> str:
    """The text of a file or a pipe, at most `limit_bytes` long.

    Raises InvalidArgumentError of `field` and `reason`, whose message begins with `what`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise InvalidArgumentError(
                f"{what}: the file is larger than {limit_bytes >> 20} MiB",
                field=field,
                reason=reason,
            )
        return data.decode()
    except OSError as error:
        raise InvalidArgumentError(
            f"{what}: cannot be read: {error.strerror}", field=field, reason=reason
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{what}: is not UTF-8: {error}", field=field, reason=reason
        ) from None


def read_toml(path: Path, what: str, field: str, reason: str = "") -> dict[str, Any]:
    """The decoded file. Raises InvalidArgumentError as `read_input` does, and for a text that is
    not TOML."""
    return parse_toml(read_input(path, what, field, reason, TOML_LIMIT_BYTES), what, field, reason)


def parse_toml(text: str, what: str, field: str, reason: str = "") -> dict[str, Any]:
    """The decoded text. Raises InvalidArgumentError as `read_toml` does."""
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a TOMLDecodeError, a number of ten thousand digits
        raise _not(what, "TOML", error, field, reason) from None


def read_json(path: Path, what: str, field: str, reason: str = "") -> Any:
    """The decoded file. Raises InvalidArgumentError as `read_input` does, and for a text that is
    not JSON."""
    text = read_input(path, what, field, reason)
    try:
        if json_values(text) > JSON_VALUES_LIMIT:
            raise ValueError(f"it may hold more than {JSON_VALUES_LIMIT} values")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not(what, "JSON", error, field, reason) from None


def _not(what: str, form: str, error: Exception, field: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{what}: is not {form}: {str(error)[:200]}", field=field, reason=reason
    )
