"""The models of the site. Blocking and safe to call from any thread; reads are answered from
memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from edgeshard.domain import errors
from edgeshard.domain.control.site import LocalModel, MissingBlob, WeightsFile
from edgeshard.domain.ids import Digest, ModelName, check_digest, check_name
from edgeshard.domain.models.model import ModelManifest
from edgeshard.storage.blobs import (
    CHUNK_BYTES,
    BlobDirectory,
    blob_size,
    blob_sizes,
    manifest_items,
)
from edgeshard.storage.checkpoint import Progress, hash_manifest
from edgeshard.storage.files import TEMPORARY, check_room, free_bytes, write_atomically
from edgeshard.storage.forms import check_small_file, skim_small_file
from edgeshard.storage.local_model import check_places, open_local
from edgeshard.storage.locations import BlobLocation, read_chunks
from edgeshard.wire.store import check_form, manifest_from_json, manifest_to_json, validate_manifest

log = structlog.get_logger()

KEPT_FREE_BYTES = 64 << 20
"""Bytes of the disk that are kept free when models are added: the coordinator's own state must
always find room."""
_PENDING_LIMIT = 16
_PARSED_BYTES = 1 << 20
"""Bytes of a small file that is parsed: parsing holds the interpreter's lock, for 15 ms at this
size."""
_ORPHAN_AGE_NS = 7 * 24 * 3600 * 10**9


class ModelStore:
    """Models by name, kept in `directory`: `names.json`, `manifests/<digest>.json` and
    `blobs/sha256/ab/<digest>`.

    Order of writing: blobs, then the manifest, then the name; deleting goes the other way. So a
    name never points to something incomplete, wherever the process dies.
    """

    def __init__(self, directory: Path, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self.blobs = BlobDirectory(directory / "blobs")
        self._directory = directory
        self._kept_free_bytes = kept_free_bytes
        self._lock = threading.Lock()
        # Replaced as a whole, never changed in place, so that readers need no lock.
        self._names: dict[ModelName, Digest] = {}
        self._manifests: dict[Digest, ModelManifest] = {}
        # Manifests someone is uploading for: only their blobs are accepted, and only in their size.
        self._pending: dict[Digest, dict[Digest, int]] = {}
        self._knows_all_needs = True
        """Whether no manifest is damaged, whose blobs nobody knows."""

    def open(self) -> None:
        """Read the models of the disk. A damaged manifest is logged, its model unusable until it is
        added again."""
        self.blobs.create()
        names = self._read_names()
        manifests = {}
        for digest in sorted(set(names.values())):
            try:
                text = self._manifest_path(digest).read_text(encoding="utf-8")
                manifests[digest] = manifest_from_json(text, digest)
            except (OSError, UnicodeDecodeError, errors.DataLossError) as error:
                log.error("manifest_damaged", digest=digest, error=str(error))
        self._names, self._manifests = names, manifests
        self._knows_all_needs = len(manifests) == len(set(names.values()))
        self._remove_strays()
        self._own_small_files()

    def _own_small_files(self) -> None:
        """Copy small files that an earlier version linked; a file that was written to since is
        lost."""
        for manifest in self._manifests.values():
            for file in manifest.files:
                try:
                    self.blobs.own(file.sha256)
                except errors.DataLossError:
                    self.blobs.remove(file.sha256)
                    log.error(
                        "linked_file_changed",
                        model=manifest.name,
                        file=file.name,
                        digest=file.sha256,
                    )
                except (errors.EdgeShardError, OSError) as error:
                    log.error(
                        "linked_file_not_copied",
                        model=manifest.name,
                        file=file.name,
                        error=str(error),
                    )

    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        """The manifest of that name or digest, under the name asked for.

        Raises NotFoundError, or DataLossError when the manifest on disk is damaged.
        """
        names, manifests = self._names, self._manifests
        by_name = names.get(ModelName(name_or_digest))
        digest = by_name or Digest(name_or_digest)
        manifest = manifests.get(digest)
        if manifest is not None:
            return (
                replace(manifest, name=ModelName(name_or_digest)) if by_name else manifest
            ), digest
        if by_name:
            raise errors.DataLossError(
                f"the stored manifest of model {name_or_digest} is damaged: add the model again",
                field="model",
            )
        known_names = ", ".join(sorted(names)) or "none yet"
        raise errors.NotFoundError(
            f"model {name_or_digest[:80]!r} is unknown; known models: {known_names}",
            field="model",
            reason="MODEL_NOT_FOUND",
        )

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]:
        """Every usable model with its manifest's digest, by name."""
        names, manifests = self._names, self._manifests
        return tuple(
            (replace(manifests[digest], name=name), digest)
            for name, digest in sorted(names.items())
            if digest in manifests
        )

    def register(self, manifest: ModelManifest) -> tuple[Digest, tuple[MissingBlob, ...]]:
        """Keep the manifest under its name when every blob is there; otherwise keep nothing. The
        digest, and the missing blobs.

        Raises InvalidArgumentError, UnsupportedModelError or DataLossError for a manifest or small
        file that is wrong, AlreadyExistsError when the name has other content,
        ResourceExhaustedError when the disk has no room for the missing blobs.
        """
        sizes = validate_manifest(manifest)
        digest = manifest.digest()
        with self._lock:
            self._check_name_free(manifest.name, digest)
            missing = tuple(self._missing(sizes))
            if missing:
                self._check_room(
                    manifest.name, sum(blob.size - blob.received for blob in missing), sizes.keys()
                )
                self._expect(digest, sizes)
                return digest, missing
            if digest not in self._manifests:
                self._check_files(manifest, digest)
                write_atomically(self._manifest_path(digest), manifest_to_json(manifest))
            names = self._names | {manifest.name: digest}
            if names != self._names:
                self._write_names(names)
            self._names, self._manifests = names, {**self._manifests, digest: manifest}
            self._forget(digest)
        return digest, ()

    def add_local(self, model: LocalModel, progress: Progress) -> Digest:
        """Register a model whose files lie on this machine. Weights stay in their files
        (`LinkedFiles.take`), and small files are copied; all are hashed here, once.

        `progress` gets (bytes hashed, bytes in all), and ends the adding by raising. Raises as
        `register` does, and FailedPreconditionError with reason NOT_THIS_MACHINE where the files
        are not those that the client sees.
        """
        draft = model.manifest
        check_form(draft)
        check_places(model)
        linked = self.blobs.linked
        of_weights = {place.file for place in model.places[: len(draft.tensors)]}
        blobs: list[BlobLocation] = []
        try:
            self._check_room_for_copies(
                [Path(file.path) for file in model.files if not file.stays], draft.name
            )
            for index, file in enumerate(model.files):
                with open_local(file) as opened:
                    if index in of_weights:
                        blobs.append(
                            linked.take(Path(file.path), opened, self.room_bytes, stays=file.stays)
                        )
                    else:
                        blobs.append(linked.copy(opened, self.room_bytes))
            locations = [
                replace(
                    blobs[place.file], offset=place.offset, size=blob_size(item), order=place.order
                )
                for place, item in zip(model.places, manifest_items(draft), strict=True)
            ]
            before = [at.path.stat().st_mtime_ns for at in blobs]
            manifest = hash_manifest(draft, locations, progress)
            if before != [at.path.stat().st_mtime_ns for at in blobs]:
                raise errors.AbortedError(
                    f"the files of model {draft.name} were written to while they were read: try "
                    "again"
                )
            return self._register_linked(manifest, locations)
        finally:
            linked.drop_unused([at.path for at in blobs])

    def _check_room_for_copies(self, files: Sequence[Path], name: ModelName) -> None:
        """Check the room for files of other disks, which must be copied, before the first of them
        is."""
        own_disk = self._directory.stat().st_dev
        needed = 0
        for file in files:
            with suppress(OSError):  # one that cannot be read is refused when it is opened
                status = file.stat()
                needed += status.st_size if status.st_dev != own_disk else 0
        check_room(
            self.blobs.linked.directory, f"a copy of model {name}", needed, self.room_bytes()
        )

    def _register_linked(
        self, manifest: ModelManifest, locations: Sequence[BlobLocation]
    ) -> Digest:
        sizes, digest = validate_manifest(manifest), manifest.digest()
        with self._lock:
            self._check_name_free(manifest.name, digest)
            self._expect(digest, sizes)  # so that nobody takes its blobs for unneeded
        tensor_locations = {
            item.sha256: at for item, at in zip(manifest.tensors, locations, strict=False)
        }
        copied = {
            item.sha256: at
            for item, at in zip(manifest.files, locations[len(manifest.tensors) :], strict=True)
        }
        self.blobs.linked.keep(
            {of: at for of, at in tensor_locations.items() if self.blobs.size(of) != at.size}
        )
        try:
            for of, at in copied.items():
                if not self.blobs.path(of).exists():
                    self.blobs.adopt(of, at.path)
            _, missing = self.register(manifest)
            if missing:
                raise errors.AbortedError(
                    f"model {manifest.name} was deleted while it was added: try again"
                )
        except BaseException:
            with self._lock:
                self._forget(digest)
                self.blobs.remove(
                    *((tensor_locations.keys() | copied.keys()) - self._needed_blobs())
                )
            raise
        return digest

    def _expect(self, digest: Digest, sizes: dict[Digest, int]) -> None:
        self._forget(digest)
        self._pending = dict(tuple((self._pending | {digest: sizes}).items())[-_PENDING_LIMIT:])

    def _forget(self, digest: Digest) -> None:
        self._pending = {of: sizes for of, sizes in self._pending.items() if of != digest}

    def _check_files(self, manifest: ModelManifest, digest: Digest) -> None:
        """Whoever sent the small files, they have their form; the large one as far as a daemon can
        look at it."""
        for file in manifest.files:
            location = BlobLocation(self.file_path(file.sha256), 0, file.size)
            try:
                if file.size <= _PARSED_BYTES:
                    check_small_file(file.name, self.blobs.read(file.sha256, 0, file.size))
                else:
                    skim_small_file(file.name, read_chunks(location, file.name, CHUNK_BYTES))
            except errors.InvalidArgumentError:
                self._forget(digest)
                if file.sha256 not in self._needed_blobs():
                    self.blobs.remove(file.sha256)
                raise

    def delete(self, name: str) -> None:
        """Drop a name; then, when no other name has the same content, its manifest and the blobs no
        other model needs.

        Raises NotFoundError.
        """
        check_name(name, "model")
        with self._lock:
            digest = self._names.get(ModelName(name))
            if digest is None:
                raise errors.NotFoundError(
                    f"model {name!r} is unknown", field="model", reason="MODEL_NOT_FOUND"
                )
            names = {other: of for other, of in self._names.items() if other != name}
            self._write_names(names)
            self._names = names
            if digest in names.values():
                return
            removed = self._manifests.get(digest)
            self._manifests = {
                of: manifest for of, manifest in self._manifests.items() if of != digest
            }
            self._manifest_path(digest).unlink(missing_ok=True)
            if removed is not None:
                self.blobs.remove(
                    *(blob_sizes(manifest_items(removed)).keys() - self._needed_blobs())
                )

    def added_at(self, digest: Digest) -> float:
        """When the model was added, in seconds since 1970: its manifest is written once. Raises
        OSError."""
        return self._manifest_path(digest).stat().st_mtime

    def file_path(self, digest: Digest) -> Path:
        """The path of a small file of a model. Raises NotFoundError."""
        location = self.blobs.locate(digest)
        if location is None:
            raise self.blobs.missing(digest)
        return location.path

    def weights_files(self, manifest: ModelManifest) -> tuple[WeightsFile, ...]:
        """The files outside of the store that have weights of a model."""
        return self.blobs.linked.files_of({tensor.sha256 for tensor in manifest.tensors})

    def room_bytes(self) -> int:
        """Bytes of the disk that uploads may use."""
        return max(0, free_bytes(self._directory) - self._kept_free_bytes)

    def expected_size(self, digest: Digest) -> int | None:
        """Bytes of a blob that a model being added needs; None for any other blob."""
        return next((sizes[digest] for sizes in self._pending.values() if digest in sizes), None)

    def give_up(self, digest: Digest) -> None:
        """Expect the blobs of models with this one no more, until somebody begins to add them
        again."""
        with self._lock:
            self._pending = {
                of: sizes for of, sizes in self._pending.items() if digest not in sizes
            }

    def _missing(self, sizes: dict[Digest, int]) -> Iterator[MissingBlob]:
        for digest, size in sizes.items():
            present = self.blobs.size(digest)
            if present is not None and present != size:
                if self.blobs.is_intact(digest, present):
                    raise errors.InvalidArgumentError(
                        f"blob {digest} has {present} bytes, but the manifest declares {size}",
                        field="manifest",
                        reason="INVALID_MANIFEST",
                    )
                self.blobs.remove(digest)
                present = None
            if present is None:
                yield MissingBlob(digest, size, min(self.blobs.received(digest), size))

    def _check_name_free(self, name: ModelName, digest: Digest) -> None:
        existing = self._names.get(name)
        if existing is not None and existing != digest and existing in self._manifests:
            raise errors.AlreadyExistsError(
                f"model {name} exists with other content (sha256 {existing[:12]}, not "
                f"{digest[:12]}): "
                f"choose another --name, or first run `edgectl delete model {name}`",
                field="name",
                reason="MODEL_EXISTS",
            )

    def _check_room(self, name: ModelName, missing_bytes: int, own: Collection[Digest]) -> None:
        """Check the room before the first byte is sent: an upload that fills the disk would fail
        late, and others with it."""
        if missing_bytes <= self.room_bytes():
            return
        self._remove_unneeded(own)
        check_room(self.blobs.linked.directory, f"model {name}", missing_bytes, self.room_bytes())

    def _remove_unneeded(self, own: Collection[Digest] = (), before_ns: int | None = None) -> None:
        """Remove blobs that arrived for models which were never completed, but for the blobs `own`;
        only those older than `before_ns`."""
        if not self._knows_all_needs:
            return
        needed = self._needed_blobs().union(own)
        for file in list(self.blobs.files()):
            if file.digest not in needed and (before_ns is None or file.used_ns < before_ns):
                self.blobs.remove(file.digest)
        self.blobs.linked.remove(set(self.blobs.linked.digests()) - needed)

    def _needed_blobs(self) -> set[Digest]:
        needed: set[Digest] = set()
        for manifest in self._manifests.values():
            needed |= blob_sizes(manifest_items(manifest)).keys()
        for sizes in self._pending.values():
            needed |= sizes.keys()
        return needed

    def _remove_strays(self) -> None:
        """Remove manifests without a name, temporary files and left-over uploads: all of them where
        the disk is short, otherwise those given up long ago, since an upload goes on where it
        stopped."""
        manifests = {self._manifest_path(digest) for digest in self._names.values()}
        strays = [
            path for path in (self._directory / "manifests").glob("*") if path not in manifests
        ]
        for path in (*strays, *self._directory.glob(f"*{TEMPORARY}")):
            path.unlink()
        # The newest file counts where it is later: the machine's clock may be wrong after a cold
        # start.
        newest = max((file.used_ns for file in self.blobs.files()), default=0)
        long_ago = max(newest, time.time_ns()) - _ORPHAN_AGE_NS
        self._remove_unneeded(before_ns=long_ago if self.room_bytes() else None)
        self.blobs.linked.drop_unused()

    def _manifest_path(self, digest: Digest) -> Path:
        return self._directory / "manifests" / f"{check_digest(digest)}.json"

    def _read_names(self) -> dict[ModelName, Digest]:
        path = self._directory / "names.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return {
                ModelName(check_name(name, "name")): check_digest(digest)
                for name, digest in values.items()
            }
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError, errors.InvalidArgumentError) as error:
            raise errors.DataLossError(
                f"{path} is damaged ({error}): restore it, or remove it and add the models again",
                field="state-dir",
            ) from None

    def _write_names(self, names: dict[ModelName, Digest]) -> None:
        path, text = self._directory / "names.json", json.dumps(names, indent=1, sort_keys=True)
        try:
            write_atomically(path, text)
        except errors.ResourceExhaustedError:  # Deleting a model must be possible now of all times.
            self._remove_unneeded()
            write_atomically(path, text)
