"""A content-addressed cache with a size limit. State is kept on the event loop; the disk is touched
in threads."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from edgeshard.domain.errors import DataLossError, ResourceExhaustedError
from edgeshard.domain.ids import Digest, check_digest
from edgeshard.domain.models.model import ModelManifest
from edgeshard.storage.blobs import BlobDirectory, in_thread, missing_blob
from edgeshard.storage.files import check_room, free_bytes, write_atomically
from edgeshard.storage.locations import BlobLocation
from edgeshard.wire.store import manifest_from_json, manifest_to_json
from edgeshard_agent.store.packed_units import PackedUnits
from edgeshard_agent.store.unit_sources import UnitSources

log = structlog.get_logger()

CACHE_LIMIT = "CACHE_LIMIT"
"""Reason of the error for a cache that is too small for what must be in it at once."""


class Pin:
    """Blobs and packed files that must stay while a stage is loading or loaded.

    Release it when the stage goes; twice is harmless.
    """

    def __init__(self, cache: BlobCache, digests: Iterable[Digest]) -> None:
        self._cache = cache
        self._digests = frozenset(digests)
        self._sources: UnitSources | None = None
        self._joined: list[Pin] = []
        self._held = True

    def location(self, digest: Digest) -> BlobLocation:
        """The place of a pinned blob. Raises NotFoundError when a shared store has lost it
        since."""
        if digest not in self._digests:
            raise KeyError(digest)
        return self._cache.location(digest)

    def hold(self, sources: UnitSources) -> None:
        """Release these packed files, too, when this is released."""
        self._sources = sources

    def join(self, other: Pin) -> None:
        """Release `other`, too, when this is released."""
        self._joined.append(other)

    async def drop(self, digests: Iterable[Digest]) -> None:
        """Let go of blobs whose numbers packed files have now, and remove those that no other pin
        holds.

        A node keeps its share of a model once.
        """
        assert self._held
        digests = frozenset(digests)
        dropped = self._digests & digests
        self._digests -= dropped
        self._cache.unpin(dropped)
        await self._cache.drop_unused(digests)

    def release(self) -> None:
        if self._held:
            self._held = False
            self._cache.unpin(self._digests)
            if self._sources is not None:
                self._sources.release()
            for other in self._joined:
                other.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BlobCache:
    """Blobs and packed files under `directory`, at most `limit_bytes` of both.

    If space is needed, the least recently used unpinned ones are removed: blobs first, because
    packed files load sooner. Partial downloads count and survive a restart. One process at a time
    owns the directory. Blobs in `shared`, the coordinator's own store on this machine, are used
    there: they are neither fetched nor counted.
    """

    def __init__(
        self, directory: Path, limit_bytes: int, shared: BlobDirectory | None = None
    ) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.blobs = BlobDirectory(directory / "blobs")
        """Its own, partial downloads included."""
        self.packed = PackedUnits(directory / "packed", lambda: self.limit_bytes - self.used_bytes)
        self._shared = shared
        self._manifests = directory / "manifests"
        # Bytes by blob, least recently used first. A blob being fetched counts in full from the
        # start.
        self._sizes: OrderedDict[Digest, int] = OrderedDict()
        self._pins: Counter[Digest] = Counter()
        self._making_room = asyncio.Lock()
        self._locks: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Load the state that an earlier process left: its blobs and partial downloads, in the
        order of their last use.
        """
        self._sizes = await in_thread(self._scan)
        await in_thread(self.packed.files)
        self.used_bytes = sum(self._sizes.values())
        async with self._making_room:
            await self._evict_until(self.limit_bytes)

    def location(self, digest: Digest) -> BlobLocation:
        """The place of a blob that is here. Raises NotFoundError if it is missing."""
        location = self.blobs.locate(digest) or (
            self._shared.locate(digest) if self._shared is not None else None
        )
        if location is None:
            raise missing_blob(digest)
        return location

    def pin(self, digests: Iterable[Digest]) -> Pin:
        """Keep these blobs, whether they are there already or come later, until the pin is
        released."""
        digests = frozenset(digests)
        self._pins.update(digests)
        return Pin(self, digests)

    def unpin(self, digests: frozenset[Digest]) -> None:
        self._pins.subtract(digests)
        for digest in digests:
            if self._pins[digest] <= 0:
                del self._pins[digest]

    def lock(self, digest: Digest) -> asyncio.Lock:
        """Held by a task that checks or fetches the blob, so that two stages fetch it once."""
        lock = self._locks.get(digest)
        if lock is None:
            self._locks[digest] = lock = asyncio.Lock()
        return lock

    async def is_intact(self, digest: Digest, size: int, *, is_weights: bool = False) -> bool:
        """Whether the whole blob is here and right; reads all of it. Removes a damaged one, marks a
        good one used.

        For a blob in a linked file of the shared store the result may change the next moment. Such
        a blob counts as intact without a read only if it is weights: `CachedTensorSource` compares
        its reads.
        """
        if await in_thread(self._verify_and_touch, digest, size):
            self._account(digest, size)
            self._touch(digest)
            return True
        if await in_thread(self.blobs.size, digest) is not None:
            log.warning("cached_blob_damaged", digest=digest)
            await self.discard(digest)
        location = None if self._shared is None else await in_thread(self._shared.locate, digest)
        if self._shared is None or location is None:
            return False
        if location.is_linked:
            return is_weights and location.size == size
        return await in_thread(self._shared.is_intact, digest, size)

    async def reserve(self, digest: Digest, size: int) -> None:
        """Make room for a blob about to be fetched, which must be pinned.

        Raises ResourceExhaustedError naming cache-limit if the pinned blobs leave no room.
        """
        if size > self.limit_bytes:
            raise self.too_small(f"one blob has {size} bytes")
        async with self._making_room:
            room = self.limit_bytes - (size - self._sizes.get(digest, 0))
            await self._evict_until(room)
            with self.packed.lock:  # a load may be writing packed files
                if self._all_bytes > room:
                    raise self.too_small(
                        f"{size} bytes more are needed while loaded stages hold the rest"
                    )
                self._account(digest, size)
            self._touch(digest)

    def check_room(self, sizes: Mapping[Digest, int]) -> None:
        """Raise ResourceExhaustedError (DISK_FULL) unless the disk has room for these blobs; call
        it before a fetch.

        Blobs that are here need no more space, and evicted ones free theirs. Blocking.
        """
        missing = 0
        for digest, size in sizes.items():
            is_shared = self._shared is not None and self._shared.locate(digest) is not None
            if not is_shared and self.blobs.size(digest) is None:
                missing += size - min(size, self.blobs.received(digest))
        evicted = max(0, self._all_bytes + missing - self.limit_bytes)
        where = self.directory / "blobs"
        check_room(where, "what the stage lacks", missing, free_bytes(where) + evicted)

    async def make_room_for_packed(self, size: int) -> None:
        """Make room for `size` bytes of packed files, as far as something can be evicted."""
        async with self._making_room:
            await self._evict_until(max(0, self.limit_bytes - size))

    @property
    def _all_bytes(self) -> int:
        return self.used_bytes + self.packed.used_bytes

    async def discard(self, digest: Digest) -> None:
        try:
            await in_thread(self.blobs.remove, digest)
        finally:  # the waiting caller may be cancelled: the file is gone all the same
            self._account(digest, 0)

    async def drop_unused(self, digests: Iterable[Digest]) -> None:
        """Remove these blobs, except those that are pinned or not here."""
        for digest in digests:
            # a fetch pins a blob before it looks for it under the lock
            async with self.lock(digest):
                if digest in self._sizes and digest not in self._pins:
                    await self.discard(digest)

    async def settle(self, digest: Digest) -> None:
        """Count the bytes that are really there after a fetch, failed or not, and leave no empty
        partial file."""
        sizes = list[int]()

        def look() -> None:
            sizes.append((self.blobs.size(digest) or 0) + self.blobs.received(digest))

        try:
            await in_thread(look)
        finally:  # a fetch that is called off may be called off twice
            for size in sizes:
                self._account(digest, size)
        if not sizes[0]:
            await self.discard(digest)

    async def manifest(self, digest: Digest) -> ModelManifest | None:
        """The manifest of that digest when it is here and intact."""
        path = self._manifest_path(digest)
        try:
            return await in_thread(
                lambda: manifest_from_json(path.read_text(encoding="utf-8"), digest)
            )
        except (FileNotFoundError, UnicodeDecodeError, DataLossError):
            return None

    async def keep_manifest(self, digest: Digest, manifest: ModelManifest) -> None:
        async with self.lock(digest):  # two loads may have asked for it
            await in_thread(
                lambda: write_atomically(self._manifest_path(digest), manifest_to_json(manifest))
            )

    def _manifest_path(self, digest: Digest) -> Path:
        return self._manifests / f"{check_digest(digest)}.json"

    def _scan(self) -> OrderedDict[Digest, int]:
        self.blobs.create()
        for stray in self._manifests.glob("*.tmp"):
            stray.unlink()
        sizes: OrderedDict[Digest, int] = OrderedDict()
        for file in sorted(self.blobs.files(), key=lambda file: file.used_ns):
            sizes[file.digest] = sizes.get(file.digest, 0) + file.size
            sizes.move_to_end(file.digest)
        return sizes

    def _verify_and_touch(self, digest: Digest, size: int) -> bool:
        if not self.blobs.is_intact(digest, size):
            return False
        # The order of last use lives in modification times, so that it survives a restart.
        self.blobs.touch(digest)
        return True

    async def _evict_until(self, limit_bytes: int) -> None:
        """Remove unpinned blobs and packed files until at most `limit_bytes` are left or none can
        be removed."""
        while self._all_bytes > limit_bytes:
            victim = next((digest for digest in self._sizes if digest not in self._pins), None)
            if victim is None:
                await in_thread(self.packed.make_room, max(0, limit_bytes - self.used_bytes))
                return
            # The lock keeps a fetch of the blob out meanwhile. While this waits for it, another
            # load may remove the blob, or pin it.
            async with self.lock(victim):
                if victim in self._sizes and victim not in self._pins:
                    log.info("cached_blob_evicted", digest=victim, bytes=self._sizes[victim])
                    await self.discard(victim)

    def _touch(self, digest: Digest) -> None:
        if digest in self._sizes:
            self._sizes.move_to_end(digest)

    def _account(self, digest: Digest, size: int) -> None:
        """Count `size` bytes for a blob; 0 forgets it."""
        self.used_bytes += size - self._sizes.get(digest, 0)
        if size:
            self._sizes[digest] = size
        else:
            self._sizes.pop(digest, None)

    def too_small(self, why: str) -> ResourceExhaustedError:
        """The refusal of what does not fit."""
        return ResourceExhaustedError(
            f"cache-limit {self.limit_bytes} bytes is too small: {why}; give more with "
            "--cache-limit",
            field="cache-limit",
            reason=CACHE_LIMIT,
        )
