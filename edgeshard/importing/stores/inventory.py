"""The models that other programs have on this disk, each as the text that `edgectl model add`
takes.

Only names, sizes and manifests are read; nothing is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edgeshard.domain.errors import EdgeShardError
from edgeshard.importing.gguf_file import parts_of
from edgeshard.importing.gguf_selection import first_files, tag_of
from edgeshard.importing.model_sources import LM_STUDIO, OLLAMA, Source
from edgeshard.importing.stores import lm_studio, ollama

MAX_MODELS = 1000
"""The most models of one program."""
HUB_CACHE, LLAMA_CACHE = "Hub cache", "llama.cpp cache"
_FOLDER = "models--"
_SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class InventoryModel:
    """A model on this disk. `text` names it for `edgectl model add`; `source` reads it without the
    network.

    `type` is the quantisation as its program names it. `problem` is why it cannot be added, "" if
    nothing is known.
    """

    text: str
    program: str
    source: Source
    size_bytes: int
    type: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The models by program, and a message for each folder that cannot be read."""

    models: tuple[InventoryModel, ...]
    problems: tuple[str, ...]


def local_models() -> Inventory:
    """All models that are found. Blocking."""
    models: list[InventoryModel] = []
    problems: list[str] = []
    folders: list[Callable[[], Iterator[InventoryModel]]] = [
        lambda folder=folder: _of_ollama(folder)  # type: ignore[misc]
        for folder in ollama.models_folders()
    ]
    for listed in (*folders, _of_lm_studio, _of_hub_cache, _of_llama_cache):
        try:
            models += islice(listed(), MAX_MODELS)
        except EdgeShardError as error:
            problems.append(error.message)
        except OSError as error:
            problems.append(f"{error.filename} cannot be read: {error.strerror}")
    return Inventory(tuple(models), tuple(problems))


def _of_ollama(folder: Path) -> Iterator[InventoryModel]:
    for manifest in ollama.list_manifests(folder):
        source = Source(ollama=manifest.name)
        text = OLLAMA + manifest.name
        try:
            model = ollama.read_model(manifest)
            size = model.path.stat().st_size
        except EdgeShardError as error:
            yield InventoryModel(
                text, ollama.PROGRAM, source, 0, "", error.message.removeprefix(f"{text} ")
            )
        except OSError as error:
            yield InventoryModel(
                text, ollama.PROGRAM, source, 0, "", f"its weights cannot be read: {error.strerror}"
            )
        else:
            yield InventoryModel(text, ollama.PROGRAM, source, size, model.file_type)


def _of_lm_studio() -> Iterator[InventoryModel]:
    for directory in lm_studio.list_models(lm_studio.models_folder()):
        text = f"{LM_STUDIO}{directory.parent.name}/{directory.name}"
        yield from _of_directory(directory, text, lm_studio.PROGRAM)


def _of_hub_cache() -> Iterator[InventoryModel]:
    cache = _hub_cache()
    for folder in sorted(cache.glob(f"{_FOLDER}*")):
        snapshots = folder / "snapshots"
        reference = folder / "refs" / "main"
        commits = [reference.read_text().strip()] if reference.is_file() else []
        commits += sorted(path.name for path in snapshots.glob("*"))
        owner, _, name = folder.name.removeprefix(_FOLDER).partition("--")
        if commits and name:
            yield from _of_directory(snapshots / commits[0], f"{owner}/{name}", HUB_CACHE)


def _of_llama_cache() -> Iterator[InventoryModel]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("LLAMA_CACHE") or home / "llama.cpp")
    for name in first_files(sorted(path.name for path in cache.glob("*.gguf"))):
        path = cache / name
        yield InventoryModel(
            str(path), LLAMA_CACHE, Source(path=path), _size(parts_of(path)), tag_of(name)
        )


def _of_directory(directory: Path, text: str, program: str) -> Iterator[InventoryModel]:
    """The GGUF models of a directory, each by its quantisation, or the safetensors in it."""
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.gguf"))
    firsts = first_files(names)
    for name in firsts:
        path = directory / name
        tag = tag_of(name)
        full_text = f"{text}:{tag}" if tag and len(firsts) > 1 else text
        yield InventoryModel(full_text, program, Source(path=path), _size(parts_of(path)), tag)
    weights = list(directory.glob("*.safetensors"))
    if weights and (directory / "config.json").is_file():
        yield InventoryModel(text, program, Source(path=directory), _size(weights), _SAFETENSORS)


def _hub_cache() -> Path:
    """The cache of huggingface_hub, without importing it: it need not be installed."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache).expanduser()
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
