"""Models of LM Studio's folder: PUBLISHER/NAME with GGUF files, or with a checkpoint of
safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.importing.gguf_selection import select_gguf
from edgeshard.importing.stores.access import SMALL_FILE_BYTES, not_readable

PROGRAM = "LM Studio"
_HOMES = (".lmstudio", ".cache/lm-studio")
_POINTER = ".lmstudio-home-pointer"


def models_folder() -> Path:
    """The folder of LM Studio's models: that of its settings, or the one in its home."""
    home = _home()
    with suppress(OSError, ValueError):
        with (home / "settings.json").open("rb") as file:
            settings = json.loads(file.read(SMALL_FILE_BYTES))
        if isinstance(settings, dict) and isinstance(settings.get("downloadsFolder"), str):
            return Path(settings["downloadsFolder"]).expanduser()
    return home / "models"


def list_models(folder: Path) -> Iterator[Path]:
    """The directories PUBLISHER/NAME of the folder. Raises DeniedError for one that this user may
    not read."""
    for publisher in _directories(folder, folder):
        yield from _directories(folder, publisher)


def find_model(name: str) -> Path:
    """The GGUF file of `[PUBLISHER/]NAME[:TAG]`, the first of its parts, or the directory of its
    safetensors.

    Raises NotFoundError, which lists what is there, InvalidArgumentError for a name of several
    publishers, and DeniedError for a folder that this user may not read.
    """
    text, _, tag = name.partition(":")
    folder = models_folder()
    lower_name = text.lower()
    matching: list[Path] = []
    available: list[str] = []
    for directory in list_models(folder):
        full = f"{directory.parent.name}/{directory.name}"
        available.append(full)
        if lower_name in (full.lower(), directory.name.lower()):
            matching.append(directory)
    if not matching:
        listed = f"it has {', '.join(available)[:1000]}" if available else "no models are there"
        what = f"LM Studio has no model {name[:200]} in {folder}: {listed}"
        raise NotFoundError(what, field="model", reason="UNKNOWN_MODEL")
    if len(matching) > 1:
        listed = ", ".join(f"{path.parent.name}/{path.name}" for path in matching)
        raise InvalidArgumentError(
            f"lmstudio:{text[:200]} has several publishers: name one of {listed}", field="model"
        )
    return _file_of(folder, matching[0], tag)


def _file_of(folder: Path, directory: Path, tag: str) -> Path:
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except OSError as error:
        raise not_readable(PROGRAM, folder, directory, error) from None
    if not tag and not any(name.lower().endswith(".gguf") for name in names):
        return directory
    return (
        directory / select_gguf(names, tag, f"lmstudio:{directory.parent.name}/{directory.name}")[0]
    )


def _home() -> Path:
    with suppress(OSError, ValueError):
        text = (Path.home() / _POINTER).read_text(encoding="utf-8").strip()
        if text and Path(text).is_dir():
            return Path(text)
    homes = [Path.home() / home for home in _HOMES]
    return next((home for home in homes if home.is_dir()), homes[0])


def _directories(folder: Path, directory: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise not_readable(PROGRAM, folder, directory, error) from None
    return [
        Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()
    ]
