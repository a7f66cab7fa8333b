"""All families: the files of `families/` are found, not listed.

A file has `ARCHITECTURE`, the record of a family that runs, or `REFUSED`, the reasons why some
families do not run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from edgeshard.architectures import families
from edgeshard.architectures.record import Architecture
from edgeshard.domain.errors import InternalError


def family_modules() -> list[ModuleType]:
    """The files of `families/`, by name. Raises InternalError for one that has neither."""
    names = sorted(module_info.name for module_info in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    for module in modules:
        if not (hasattr(module, "ARCHITECTURE") or hasattr(module, "REFUSED")):
            raise InternalError(f"{module.__name__} has neither ARCHITECTURE nor REFUSED")
    return modules


def by_name(modules: Iterable[object]) -> dict[str, Architecture]:
    """The records in files, by name. Raises InternalError if two have one name or one model_type.

    Two may match a model which nests either, as long as they differ in the nested part.
    """
    names: dict[str, Architecture] = {}
    types: set[str | tuple[str, str]] = set()
    for record in (module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")):
        own = {*record.own_types, *record.nested.items()}
        if record.name in names or types & own:
            raise InternalError(
                f"two architectures answer to {record.name} or to one of {record.answers_to}"
            )
        names[record.name] = record
        types |= own
    return names


def refused_types(modules: Iterable[ModuleType]) -> dict[str, str]:
    """The reasons why families do not run, by model_type."""
    merged: dict[str, str] = {}
    for module in modules:
        for what, model_types in getattr(module, "REFUSED", {}).items():
            merged |= dict.fromkeys(model_types, what)
    return merged


_FOUND = family_modules()
RECORDS: Mapping[str, Architecture] = by_name(_FOUND)
ARCHITECTURES: tuple[str, ...] = tuple(RECORDS)
"""The names of all families that run, in alphabetical order of their files."""
REFUSED: Mapping[str, str] = refused_types(_FOUND)
KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    name: config for record in RECORDS.values() for name, config in record.models.items()
}
"""Configs of published models by name, for planning without any file."""
NESTED: Mapping[str, Mapping[str, Architecture]] = {
    outer: {record.nested[outer]: record for record in RECORDS.values() if outer in record.nested}
    for outer in {outer for record in RECORDS.values() for outer in record.nested}
}
"""By the model_type of a config.json that nests the decoder, the records by the model_type in
there."""
_BY_TYPE = {
    kind: record for record in RECORDS.values() for kind in (record.name, *record.answers_to)
}


def find(architecture: str) -> Architecture | None:
    """The record of this name, or answering to this model_type."""
    return _BY_TYPE.get(architecture)


def architecture_named(name: str) -> Architecture:
    """The record a `ModelShape.architecture` names."""
    return RECORDS[name]
