"""A model on the coordinator's own machine: the names that a client gives its files, and how a
store finds them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from edgeshard.domain.control.site import LocalFile, LocalModel, LocalPlace
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, InvalidArgumentError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import FileInfo, ModelManifest
from edgeshard.storage.blobs import blob_size, manifest_items
from edgeshard.storage.checkpoint import Checkpoint, item_locations
from edgeshard.storage.model_directory import open_regular

HEAD_BYTES = 64 << 10
NOT_THIS_MACHINE = "NOT_THIS_MACHINE"


def local_model(checkpoint: Checkpoint, draft: ModelManifest) -> LocalModel:
    """The description of a checkpoint's files for a store on this machine. Reads the first bytes of
    each."""
    locations = item_locations(checkpoint, draft)
    paths = sorted({location.path for location in locations})
    files = []
    for path in paths:
        stays = checkpoint.scratch is None or not path.is_relative_to(checkpoint.scratch)
        with open_regular(path) as file:
            files.append(replace(_described(path, file), stays=stays))
    index = {path: position for position, path in enumerate(paths)}
    return LocalModel(
        draft,
        tuple(files),
        tuple(LocalPlace(index[at.path], at.offset, at.order) for at in locations),
    )


def check_places(model: LocalModel) -> None:
    """Raise InvalidArgumentError if a client puts a tensor or a small file outside of its files."""
    items = manifest_items(model.manifest)
    if len(model.places) != len(items):
        raise _misplaced(f"has {len(model.places)} entries for {len(items)} tensors and files")
    for place, item in zip(model.places, items, strict=True):
        # A small file is one by itself: a node opens it.
        size = blob_size(item)
        left = (
            model.files[place.file].size - place.offset - size
            if place.file < len(model.files)
            else -1
        )
        if left < 0 or (isinstance(item, FileInfo) and (left or place.offset or place.order)):
            raise _misplaced(f"gives {item.name[:80]} a place at which no file has its bytes")
        if place.order is not None and not place.order.fits(size):
            raise _misplaced(
                f"gives {item.name[:80]} an order of rows that {size} bytes cannot have"
            )
    tensors = len(model.manifest.tensors)
    if {place.file for place in model.places[:tensors]} & {
        place.file for place in model.places[tensors:]
    }:
        raise _misplaced("puts a tensor into a small file")


def open_local(local_file: LocalFile) -> BinaryIO:
    """The open file that a client described, when it is the same one here.

    Raises FailedPreconditionError with reason NOT_THIS_MACHINE where there is none, or another, or
    it may not be read: the client sends the bytes then.
    """
    try:
        if not local_file.path.startswith("/"):
            raise not_this_machine()
        file = open_regular(Path(local_file.path))
    except (EdgeShardError, ValueError):  # a path with a zero byte
        raise not_this_machine() from None
    if _described(Path(local_file.path), file) != replace(local_file, stays=False):
        file.close()
        raise not_this_machine()
    return file


def not_this_machine() -> FailedPreconditionError:
    """The error of files that are not found here."""
    # It names no file and no cause: a caller on another machine may have asked.
    return FailedPreconditionError(
        "the coordinator does not find the model's files on its machine: send them",
        field="files",
        reason=NOT_THIS_MACHINE,
    )


def _misplaced(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"places {what}", field="places", reason="INVALID_MANIFEST")


def _described(path: Path, file: BinaryIO) -> LocalFile:
    status = os.fstat(file.fileno())
    head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
    return LocalFile(
        str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, Digest(head)
    )
