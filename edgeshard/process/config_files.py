"""The content of a file of settings, checked before a daemon is started with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from edgeshard.domain.errors import EdgeShardError
from edgeshard.process.config import (
    DaemonSettings,
    Given,
    build_settings,
    option,
    read_sections,
    unknown_key,
    variable,
    with_paths,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a daemon. `value` is None if it has none, and `source` is the place that sets
    it. A `reloaded` one is applied on SIGHUP."""

    key: str
    option: str
    variable: str
    value: Any
    source: str
    default: Any
    required: bool
    reloaded: bool
    meaning: str


def problems(path: Path, kinds: Mapping[str, type[DaemonSettings]]) -> list[str]:
    """All mistakes in the daemons' sections of a file, in words that name the key. A missing key
    may be on a command line, so it is no mistake. Raises InvalidArgumentError for a file that is no
    file of settings."""
    mistakes = []
    for section, values in read_sections(path).items():
        if section in kinds:
            mistakes += _wrong(path, kinds[section], values)
    return mistakes


def _wrong(path: Path, kind: type[DaemonSettings], values: Mapping[str, Any]) -> list[str]:
    mistakes = [unknown_key(path, key, kind) for key in values if key not in kind.model_fields]
    valid_values = {key: value for key, value in values.items() if key in kind.model_fields}
    valid_values = _completed(kind, with_paths(path, kind, valid_values))
    where = f"--config {path}: [{kind.section}]"
    while True:
        try:
            kind(**valid_values).check()
            return mistakes
        except ValidationError as error:
            wrong = {key: f"{key}: {one['msg'].lower()}" for one in error.errors() if (key := str(one["loc"][0]))}
        except EdgeShardError as error:
            wrong = {error.field.replace("-", "_"): error.message}
        mistakes += [f"{where} {why}" for why in wrong.values()]
        if not wrong.keys() & valid_values.keys():
            return mistakes
        # The next pass checks the rest.
        valid_values = _completed(kind, {key: value for key, value in valid_values.items() if key not in wrong})


def _completed(kind: type[DaemonSettings], values: Mapping[str, Any]) -> dict[str, Any]:
    """With something for each required setting that is missing."""
    return {name: "-" for name, field in kind.model_fields.items() if field.is_required()} | dict(values)


def settings_of(kind: type[DaemonSettings], sources: Given) -> list[Setting]:
    """Each setting of a daemon with the value that it would have. Raises InvalidArgumentError as
    `build_settings`, except for a missing required one."""
    values = sources.merged()
    absent = [name for name, field in kind.model_fields.items() if field.is_required() and name not in values]
    built = build_settings(kind, _completed(kind, values)).model_dump(mode="json")
    return [
        Setting(
            name,
            option(name),
            variable(kind.section, name),
            None if name in absent else built[name],
            "missing" if name in absent else sources.source_of(name),
            None if (default := field.get_default(call_default_factory=True)) is PydanticUndefined else default,
            field.is_required(),
            name in kind.reloaded,
            field.description or "",
        )
        for name, field in kind.model_fields.items()
    ]
