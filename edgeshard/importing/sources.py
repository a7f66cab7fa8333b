"""The sources that an operator may name as a model: a directory, a GGUF file, or a repository of the Hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.hub import fetch
from edgeshard.importing.imported import Imported, Progress, notes_of, tensor_notes
from edgeshard.importing.quantised import open_quantised, quantisation_of
from edgeshard.importing.tiktoken import RANKS_LIMIT_BYTES, ranks_file, tokenizer_of
from edgeshard.storage.checkpoint import StoredFile, open_checkpoint, read_config
from edgeshard.storage.forms import TOKENIZER, TOKENIZER_SETTINGS, parse_json_object
from edgeshard.storage.model_directory import ModelDirectory, open_regular

_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w.+/-]{1,200}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """The place of a model: a path, or a repository and a revision of it."""

    path: Path | None = None
    repository: str = ""
    revision: str = ""

    @property
    def name(self) -> str:
        """The model's name in the store unless another is given, in the characters that a name may have."""
        if self.path is None:
            text = self.repository.partition("/")[2]
        else:
            path = self.path.absolute()
            path = path.parent if path.name == "config.json" else path
            text = path.stem if path.is_file() else path.resolve().name
        return re.sub(r"[^a-z0-9._-]+", "-", text.lower())[:63].strip("-._") or "model"


def parse_source(text: str) -> Source:
    """The source behind `./DIR`, `FILE.gguf` or `OWNER/NAME[@REVISION]`; a path of this machine goes first.

    Raises NotFoundError for a path that is not there, and for a text that is none of them.
    """
    with suppress(OSError, RuntimeError, ValueError):  # no path at all, such as a text that is too long for one
        path = Path(text).expanduser()
        if path.is_dir() or path.is_file():
            return Source(path=path)
    looks_local = text.startswith(("/", "./", "../", "~")) or text.lower().endswith(".gguf") or text.count("/") > 1
    found = None if looks_local and "@" not in text else _REPOSITORY.fullmatch(text)
    if found is None or ".." in text:
        what = "no such file or directory" if looks_local else "neither a directory, a .gguf file nor OWNER/NAME"
        raise NotFoundError(f"{text[:200]}: {what}", field="model")
    return Source(repository=found[1], revision=found[2] or "")


def open_directory(path: Path, scratch: Path, width: Width, progress: Progress) -> Imported:
    """The model in a directory of safetensors. Raises as `open_checkpoint` and `open_quantised` do."""
    if quantisation_of(read_config(path)) is not None:
        imported = open_quantised(path, scratch, width, progress)
    else:
        imported = Imported(open_checkpoint(path))
    notes = notes_of(imported.checkpoint.config) + tensor_notes(imported.checkpoint.config, imported.checkpoint.tensors)
    return _with_tokenizer(replace(imported, notes=(*notes, *imported.notes)), path, scratch)


def _with_tokenizer(imported: Imported, path: Path, scratch: Path) -> Imported:
    """The same model with a tokenizer.json, written into `scratch`, where its directory has one of tiktoken's only."""
    checkpoint = imported.checkpoint
    files = {file.name: file.path for file in checkpoint.files}
    model = ModelDirectory.at(path)
    name = None if TOKENIZER in files else ranks_file(entry.name for entry in model.root.iterdir())
    if name is None:
        return imported
    text = files[TOKENIZER_SETTINGS].read_text(encoding="utf-8") if TOKENIZER_SETTINGS in files else "{}"
    settings = parse_json_object(text, TOKENIZER_SETTINGS)
    with open_regular(model.file(name), name) as file:
        data = tokenizer_of(name, file.read(RANKS_LIMIT_BYTES + 1), settings)
    made = scratch / TOKENIZER
    made.write_bytes(data)
    checkpoint = replace(checkpoint, files=(*checkpoint.files, StoredFile(TOKENIZER, made, len(data))))
    note = f"its {TOKENIZER} was made of {name}, without the model's code"
    return replace(imported, checkpoint=checkpoint, notes=(*imported.notes, note))


@contextmanager
def opened(source: Source, width: Width, progress: Progress) -> Iterator[Imported]:
    """The model, ready to be added as long as the context is open: converted tensors lie in a temporary directory.

    Blocking. Raises typed errors that say what to do.
    """
    path = fetch(source.repository, source.revision, progress) if source.path is None else source.path
    with tempfile.TemporaryDirectory(prefix="edgeshard-") as scratch:
        if not path.is_file():
            yield open_directory(path, Path(scratch), width, progress)
        elif path.suffix.lower() == ".gguf":
            yield open_gguf(path.resolve(), Path(scratch), width, progress)
        else:
            what = f"{path} is a file, but no .gguf; name the directory of a checkpoint"
            raise InvalidArgumentError(what, field="model")
