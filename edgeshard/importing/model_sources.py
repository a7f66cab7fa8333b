"""The sources that an operator may name as a model: a directory, a GGUF file, a repository of the
Hub, or a model of another program on this machine."""

from __future__ import annotations

import json
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.architectures import parse_config
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.domain.ids import check_name
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.hub import fetch
from edgeshard.importing.imported import (
    Imported,
    Progress,
    notes_of,
    recommendation_notes,
    tensor_notes,
)
from edgeshard.importing.older_settings import older_settings
from edgeshard.importing.quantised import (
    check_layout,
    checked_quantisation,
    open_quantised,
    without_quantisation,
)
from edgeshard.importing.stores import lm_studio, ollama
from edgeshard.importing.tiktoken import RANKS_LIMIT_BYTES, ranks_file, tokenizer_of
from edgeshard.storage.checkpoint import (
    Checkpoint,
    StoredFile,
    open_checkpoint,
    read_config,
    small_files,
)
from edgeshard.storage.forms import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    check_small_file,
    parse_json_object,
)
from edgeshard.storage.model_directory import ModelDirectory, open_regular

_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
"""The end of a GGUF part's name."""
_REPOSITORY = re.compile(
    r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([\w.-]{1,64}))?(?:@([\w.+/-]{1,200}))?",
    re.ASCII,
)
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a model: a path, a repository and a revision of it, or a name in Ollama's store.

    `tag` is the quantisation of a repository's GGUF file; "" without one.
    """

    path: Path | None = None
    repository: str = ""
    revision: str = ""
    tag: str = ""
    ollama: str = ""

    def __str__(self) -> str:
        """The text that `parse_source` reads."""
        if self.path is not None:
            return str(self.path)
        if self.ollama:
            return OLLAMA + self.ollama
        tag = self.tag and f":{self.tag}"
        revision = self.revision and f"@{self.revision}"
        return f"{self.repository}{tag}{revision}"

    @property
    def name(self) -> str:
        """The model's name in the store unless another is given, in the characters that a name may
        have."""
        if self.ollama:
            text = self.ollama.removesuffix(":latest").rpartition("/")[2]
        elif self.path is None:
            text = self.repository.partition("/")[2] + (self.tag and f"-{self.tag}")
        else:
            path = self.path.absolute()
            path = path.parent if path.name == "config.json" else path
            real = path.resolve()
            if path.is_file():
                text = _PART_NUMBER.sub("", path.stem)
            elif real.parent.name == "snapshots":
                # of the Hub's cache: models--OWNER--NAME/snapshots/REVISION
                text = real.parent.parent.name.rpartition("--")[2]
            else:
                text = real.name
        return re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:63].strip("-._") or "model"


def is_source(text: str) -> bool:
    """Whether a text names a model outside of the coordinator's store: no name of the store has
    these characters."""
    return "/" in text or text.lower().endswith(".gguf") or names_program(text)


def names_program(text: str) -> bool:
    """Whether a text names a model of another program."""
    return text.startswith((OLLAMA, LM_STUDIO))


def parse_source(text: str) -> Source:
    """The source that `./DIR`, `FILE.gguf`, `OWNER/NAME[:TAG][@REVISION]`, `ollama:NAME[:TAG]` or
    `lmstudio:[PUBLISHER/]NAME[:TAG]` names; a path of this machine goes first.

    Raises NotFoundError for a path that is not there, and for a text that is none of them; as
    `find_manifest` and `find_model` do for models of other programs.
    """
    # no path at all, such as a text that is too long for one
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(text).expanduser()
        if path.is_dir() or path.is_file():
            return Source(path=path)
    if text.startswith(OLLAMA):
        name = text.removeprefix(OLLAMA)
        ollama.find_manifest(name)
        return Source(ollama=name)
    if text.startswith(LM_STUDIO):
        return Source(path=lm_studio.find_model(text.removeprefix(LM_STUDIO)))
    looks_local = (
        text.startswith(("/", "./", "../", "~"))
        or text.lower().endswith(".gguf")
        or text.count("/") > 1
    )
    repository = None if looks_local and "@" not in text else parse_repository(text)
    if repository is None:
        what = "neither a directory, a .gguf file, OWNER/NAME, ollama:NAME nor lmstudio:NAME"
        if looks_local:
            what = "no such file or directory"
        raise NotFoundError(f"{text[:200]}: {what}", field="model")
    return repository


def parse_repository(text: str) -> Source | None:
    """The source `OWNER/NAME[:TAG][@REVISION]` of the Hub; None if the text has another form."""
    match = _REPOSITORY.fullmatch(text)
    if match is None or ".." in text:
        return None
    return Source(repository=match[1], tag=match[2] or "", revision=match[3] or "")


def named_source(source: Path | str, name: str | None) -> tuple[Source, str]:
    """The place of a model, and its name in the store: before a download or a conversion that takes
    minutes.

    Raises InvalidArgumentError for a name that is not valid, and as `parse_source` does.
    """
    where = parse_source(source) if isinstance(source, str) else Source(path=source)
    model_name = where.name if name is None else name
    check_name(model_name, "name")
    return where, model_name


def open_directory(path: Path, scratch: Path, width: Width, progress: Progress) -> Imported:
    """The model in a directory of safetensors. Raises as `open_checkpoint` and `open_quantised`
    do."""
    model = ModelDirectory.at(path)
    config = read_config(path)
    notes: list[str] = []
    if checked_quantisation(config) is None:
        checkpoint = open_checkpoint(path)
        check_layout({tensor.name for tensor in checkpoint.tensors})
        files = _with_settings(
            model, _with_tokenizer(model, checkpoint.files, scratch, notes), scratch
        )
        imported = Imported(replace(checkpoint, files=files), checkpoint.notes)
    else:
        parse_config(without_quantisation(config))
        files = _with_settings(
            model, _with_tokenizer(model, small_files(model), scratch, notes), scratch
        )
        imported = open_quantised(path, files, scratch, width, progress)
    checkpoint = imported.checkpoint
    about_model = notes_of(checkpoint.config) + tensor_notes(checkpoint.config, checkpoint.tensors)
    return replace(
        imported, notes=(*about_model, *imported.notes, *notes, *recommendation_notes(files))
    )


def _with_tokenizer(
    model: ModelDirectory, files: tuple[StoredFile, ...], scratch: Path, notes: list[str]
) -> tuple[StoredFile, ...]:
    """The files with a tokenizer.json, written into `scratch`, if the directory has one of
    tiktoken's only."""
    paths = {file.name: file.path for file in files}
    name = None if TOKENIZER in paths else ranks_file(entry.name for entry in model.root.iterdir())
    if name is None:
        return files
    with open_regular(model.file(name), name) as file:
        data = tokenizer_of(name, file.read(RANKS_LIMIT_BYTES + 1), _settings(files))
    notes.append(f"its {TOKENIZER} was made of {name}, without the model's code")
    return (*files, _written(scratch, TOKENIZER, data))


def _with_settings(
    model: ModelDirectory, files: tuple[StoredFile, ...], scratch: Path
) -> tuple[StoredFile, ...]:
    """The files with a tokenizer_config.json, written into `scratch`, if older files of the
    directory add to it."""
    settings = _settings(files)
    added = older_settings(model, settings, any(file.name == CHAT_TEMPLATE for file in files))
    if not added:
        return files
    data = json.dumps(settings | added, ensure_ascii=False).encode("utf-8", "surrogatepass")
    check_small_file(TOKENIZER_SETTINGS, data)
    others = (file for file in files if file.name != TOKENIZER_SETTINGS)
    return (*others, _written(scratch, TOKENIZER_SETTINGS, data))


def _settings(files: tuple[StoredFile, ...]) -> dict[str, Any]:
    """The decoded tokenizer_config.json; empty without one."""
    path = next((file.path for file in files if file.name == TOKENIZER_SETTINGS), None)
    return (
        {}
        if path is None
        else parse_json_object(path.read_text(encoding="utf-8"), TOKENIZER_SETTINGS)
    )


def _written(scratch: Path, name: str, data: bytes) -> StoredFile:
    path = scratch / name
    path.write_bytes(data)
    return StoredFile(name, path, len(data))


@contextmanager
def opened(source: Source, width: Width, progress: Progress) -> Iterator[Imported]:
    """The model, ready to be added as long as the context is open: converted tensors lie in a
    temporary directory.

    Blocking. Raises typed errors that say what to do.
    """
    path = source.path
    if path is None and not source.ollama:
        path = fetch(source.repository, source.revision, progress, source.tag)
    with tempfile.TemporaryDirectory(prefix="edgeshard-") as name:
        scratch = Path(name)
        if path is None:
            imported = ollama.open_model(source.ollama, scratch, width, progress)
        elif not path.is_file():
            imported = open_directory(path, scratch, width, progress)
        elif path.suffix.lower() == ".gguf":
            imported = open_gguf(path, scratch, width, progress)
        else:
            what = f"{path} is a file, but no .gguf; name the directory of a checkpoint"
            raise InvalidArgumentError(what, field="model")
        checkpoint = replace(imported.checkpoint, scratch=scratch)
        _share_scratch(checkpoint, scratch, path)
        yield replace(imported, checkpoint=checkpoint)


def _share_scratch(checkpoint: Checkpoint, scratch: Path, source: Path | None) -> None:
    """Let other users read what was made of files that they can read: the coordinator may run as
    one of them.

    `source` is the file or directory of the model; None if the files of the checkpoint are all
    there is.
    """
    named = set() if source is None else {source}
    sources = {
        *named,
        *(item.file for item in checkpoint.tensors),
        *(item.path for item in checkpoint.files),
    }
    scratch_files = [path for path in sources if path.is_relative_to(scratch)]
    if all(path.stat().st_mode & stat.S_IROTH for path in sources.difference(scratch_files)):
        for path in scratch_files:
            path.chmod(0o644)
        scratch.chmod(0o755)
