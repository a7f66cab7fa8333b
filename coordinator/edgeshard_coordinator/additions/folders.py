"""The folders from which a coordinator adds models, and the models in them. Nothing outside of them
is read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.importing.gguf_file import parts_of
from edgeshard.importing.model_sources import Source

MAX_DEPTH = 3
"""Levels of directories that are searched below each folder, the number of
`models--OWNER--NAME/snapshots/REVISION` in the Hub's cache."""
MAX_MODELS = 200
MAX_ENTRIES = 20_000
"""Models and directory entries of one search, over all folders."""
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A model of a folder: its absolute `path`, the `name` that it would have, and the bytes of its
    weights."""

    path: Path
    name: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class FolderListing:
    """The models of a folder by path. `problem` is why it cannot be read, "" if it can; `is_cut`
    means that the search ended at a limit."""

    folder: Path
    models: tuple[FolderModel, ...] = ()
    problem: str = ""
    is_cut: bool = False


class ModelFolders:
    """The folders that the settings name. Blocking."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folder.absolute() for folder in folders)

    def list(self) -> list[FolderListing]:
        """The models of each folder."""
        search = _Search()
        return [search.listed(folder) for folder in self.folders]

    def check(self, text: str) -> Path:
        """The model at this path, without links.

        Raises InvalidArgumentError for a path that is, or has a file that is, in none of the
        folders, and NotFoundError if nothing is there.
        """
        try:
            path = Path(text).resolve()
            is_inside = self.contains(path) and is_text(str(path))
            exists = path.exists()
        except (OSError, RuntimeError, ValueError):  # a link that leads to itself, a zero byte
            is_inside = exists = False
        if not is_inside or not Path(text).is_absolute():
            raise InvalidArgumentError(
                f"source: {text[:200]!r} is outside the folders of --model-folder: move the model "
                "into one of "
                "them, or run `edgectl model add` on the machine that has it",
                field="source",
                reason="OUTSIDE_FOLDERS",
            )
        if not exists:
            raise NotFoundError(
                f"source: {text[:200]!r} does not exist: list the folders again", field="source"
            )
        try:
            files = list(path.iterdir()) if path.is_dir() else parts_of(path)
            outside = [
                file.name
                for file in files
                if file.is_symlink() and not self.contains(file.resolve())
            ]
        except (OSError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"source: {text[:200]!r} cannot be read ({error}): let the coordinator's user read "
                "it",
                field="source",
            ) from None
        if outside:
            raise InvalidArgumentError(
                f"source: {outside[0][:80]!r} is a link out of the folders of --model-folder: put "
                "the "
                "file itself there",
                field="source",
                reason="OUTSIDE_FOLDERS",
            )
        return path

    def contains(self, path: Path) -> bool:
        """Whether a path without links is in one of the folders, or is one of them."""
        return any(path.is_relative_to(folder.resolve()) for folder in self.folders)


class _Search:
    """One search of all folders, within the limits."""

    def __init__(self) -> None:
        self._models = MAX_MODELS
        self._entries = MAX_ENTRIES

    def listed(self, folder: Path) -> FolderListing:
        try:
            next(os.scandir(folder), None)
        except FileNotFoundError:
            return FolderListing(
                folder, problem="it does not exist: create it, or name another by --model-folder"
            )
        except OSError as error:
            return FolderListing(
                folder, problem=f"{error.strerror}: let the coordinator's user read this folder"
            )
        models = list[FolderModel]()
        for model in self._below(folder, 0):
            if not self._models:
                break
            self._models -= 1
            models.append(model)
        return FolderListing(folder, tuple(models), is_cut=not (self._models and self._entries))

    def _below(self, directory: Path, depth: int) -> Iterator[FolderModel]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:  # of another user
            return
        entries = [
            entry for entry in entries if not entry.name.startswith(".") and is_text(entry.name)
        ]
        entries = entries[: self._entries]
        self._entries -= len(entries)
        if any(entry.name == "config.json" for entry in entries):
            weights = sum(_size(entry) for entry in entries if entry.name.endswith(".safetensors"))
            yield FolderModel(directory, Source(path=directory).name, weights)
        for entry in entries:
            path = Path(entry.path)
            is_gguf = entry.name.lower().endswith(".gguf") and not _LATER_PART.search(entry.name)
            if is_gguf and entry.is_file(follow_symlinks=False):
                size = sum(part.stat().st_size for part in parts_of(path) if part.is_file())
                yield FolderModel(path, Source(path=path).name, size)
            elif depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                yield from self._below(path, depth + 1)


def is_text(name: str) -> bool:
    """Whether a path can be sent to a browser: not if it has bytes that are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # a link that leads nowhere
        return 0
