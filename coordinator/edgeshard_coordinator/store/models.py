"""Which models there are. Blocking and safe to call from any thread; reads are answered from memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import structlog

from edgeshard.domain.errors import AlreadyExistsError, DataLossError, InvalidArgumentError, NotFoundError
from edgeshard.domain.ids import Digest, ModelName, check_digest, check_name
from edgeshard.domain.model import ModelManifest
from edgeshard.domain.site import MissingBlob
from edgeshard.storage.blobs import BlobDirectory, blob_sizes, manifest_items, write_atomically
from edgeshard.wire.store import manifest_from_json, manifest_to_json, validate_manifest

log = structlog.get_logger()

_PENDING_LIMIT = 16
_ORPHAN_AGE_NS = 7 * 24 * 3600 * 10**9


class ModelStore:
    """Models by name, kept in `directory`: `names.json`, `manifests/<digest>.json` and `blobs/sha256/ab/<digest>`.

    Order of writing: blobs, then the manifest, then the name; deleting goes the other way. So a name never points to
    something incomplete, wherever the process dies.
    """

    def __init__(self, directory: Path) -> None:
        self.blobs = BlobDirectory(directory / "blobs")
        self._directory = directory
        self._lock = threading.Lock()
        # Replaced as a whole, never changed in place, so that readers need no lock.
        self._names: dict[ModelName, Digest] = {}
        self._manifests: dict[Digest, ModelManifest] = {}
        # Manifests someone is uploading for: only their blobs are accepted, and only in their size.
        self._pending: dict[Digest, dict[Digest, int]] = {}

    def open(self) -> None:
        """Read what is there. A damaged manifest is logged, its model unusable until it is added again."""
        self.blobs.create()
        names = self._read_names()
        manifests = {}
        for digest in sorted(set(names.values())):
            try:
                text = self._manifest_path(digest).read_text(encoding="utf-8")
                manifests[digest] = manifest_from_json(text, digest)
            except (OSError, UnicodeDecodeError, DataLossError) as error:
                log.error("manifest_damaged", digest=digest, error=str(error))
        self._names, self._manifests = names, manifests
        self._remove_strays()

    def get(self, name_or_digest: str) -> tuple[ModelManifest, Digest]:
        """The manifest of that name or digest, under the name asked for.

        Raises NotFoundError, or DataLossError when the manifest on disk is damaged.
        """
        names, manifests = self._names, self._manifests
        by_name = names.get(ModelName(name_or_digest))
        digest = by_name or Digest(name_or_digest)
        manifest = manifests.get(digest)
        if manifest is not None:
            return (replace(manifest, name=ModelName(name_or_digest)) if by_name else manifest), digest
        if by_name:
            raise DataLossError(
                f"the stored manifest of model {name_or_digest} is damaged: add the model again", field="model"
            )
        known = ", ".join(sorted(names)) or "none yet"
        raise NotFoundError(
            f"model {name_or_digest[:80]!r} is unknown; known models: {known}", field="model", reason="MODEL_NOT_FOUND"
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
        """Keep the manifest under its name when every blob is there; otherwise say what is missing and keep nothing.

        Raises InvalidArgumentError, UnsupportedModelError or DataLossError for a manifest that is wrong,
        AlreadyExistsError when the name has other content.
        """
        sizes = validate_manifest(manifest)
        digest = manifest.digest()
        with self._lock:
            self._check_name_free(manifest.name, digest)
            missing = tuple(self._missing(sizes))
            if missing:
                pending = {of: other for of, other in self._pending.items() if of != digest} | {digest: sizes}
                self._pending = dict(tuple(pending.items())[-_PENDING_LIMIT:])
                return digest, missing
            if digest not in self._manifests:
                write_atomically(self._manifest_path(digest), manifest_to_json(manifest))
            names = self._names | {manifest.name: digest}
            if names != self._names:
                self._write_names(names)
            self._names, self._manifests = names, {**self._manifests, digest: manifest}
            self._pending = {of: other for of, other in self._pending.items() if of != digest}
        return digest, ()

    def delete(self, name: str) -> None:
        """Drop a name; then, when no other name has the same content, its manifest and the blobs no other model needs.

        Raises NotFoundError.
        """
        check_name(name, "model")
        with self._lock:
            digest = self._names.get(ModelName(name))
            if digest is None:
                raise NotFoundError(f"model {name!r} is unknown", field="model", reason="MODEL_NOT_FOUND")
            names = {other: of for other, of in self._names.items() if other != name}
            self._write_names(names)
            self._names = names
            if digest in names.values():
                return
            removed = self._manifests.get(digest)
            self._manifests = {of: manifest for of, manifest in self._manifests.items() if of != digest}
            self._manifest_path(digest).unlink(missing_ok=True)
            if removed is not None:
                for blob in blob_sizes(manifest_items(removed)).keys() - self._needed_blobs():
                    self.blobs.remove(blob)

    def expected_size(self, digest: Digest) -> int | None:
        """Bytes of a blob that a model being added needs; None for any other blob."""
        return next((sizes[digest] for sizes in self._pending.values() if digest in sizes), None)

    def _missing(self, sizes: dict[Digest, int]) -> Iterator[MissingBlob]:
        for digest, size in sizes.items():
            present = self.blobs.size(digest)
            if present is not None and present != size:
                if self.blobs.is_intact(digest, present):
                    raise InvalidArgumentError(
                        f"blob {digest} has {present} bytes, not the {size} the manifest says",
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
            raise AlreadyExistsError(
                f"model {name} exists with other content (sha256 {existing[:12]}, not {digest[:12]}): "
                f"choose another --name, or first run `edgectl delete model {name}`",
                field="name",
                reason="MODEL_EXISTS",
            )

    def _needed_blobs(self) -> set[Digest]:
        needed: set[Digest] = set()
        for manifest in self._manifests.values():
            needed |= blob_sizes(manifest_items(manifest)).keys()
        for sizes in self._pending.values():
            needed |= sizes.keys()
        return needed

    def _remove_strays(self) -> None:
        """Manifests without a name, temporary files, and what uploads given up long ago left behind."""
        kept = {self._manifest_path(digest) for digest in self._names.values()}
        for path in (self._directory / "manifests").glob("*"):
            if path not in kept:
                path.unlink()
        if len(self._manifests) < len(set(self._names.values())):
            # Which blobs the damaged manifest needs is unknown: keep them all for when the model is added again.
            return
        needed = self._needed_blobs()
        files = list(self.blobs.files())
        # Age is measured against the newest file, not the machine's clock, which may be wrong after a cold start.
        newest = max((file.used_ns for file in files), default=0)
        for file in files:
            if file.digest not in needed and file.used_ns < newest - _ORPHAN_AGE_NS:
                self.blobs.remove(file.digest)

    def _manifest_path(self, digest: Digest) -> Path:
        return self._directory / "manifests" / f"{check_digest(digest)}.json"

    def _read_names(self) -> dict[ModelName, Digest]:
        path = self._directory / "names.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return {ModelName(check_name(name, "name")): check_digest(digest) for name, digest in values.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError, InvalidArgumentError) as error:
            raise DataLossError(
                f"{path} is damaged ({error}): restore it, or remove it and add the models again", field="state-dir"
            ) from None

    def _write_names(self, names: dict[ModelName, Digest]) -> None:
        write_atomically(self._directory / "names.json", json.dumps(names, indent=1, sort_keys=True))
