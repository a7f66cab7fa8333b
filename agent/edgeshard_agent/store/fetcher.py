"""Fetching manifests and blobs from the coordinator's store into the cache, with resume and
verification."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc
import structlog

from edgeshard.domain.control.site import BlobRange
from edgeshard.domain.errors import DataLossError, EdgeShardError, UnavailableError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import FileInfo, ModelManifest, TensorInfo
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.proto.v1 import store_pb2_grpc
from edgeshard.storage.blobs import blob_sizes, in_thread
from edgeshard.storage.locations import CHANGED_SINCE_ADDED
from edgeshard.wire.status import from_rpc_error
from edgeshard.wire.store import blob_range_to_wire, manifest_from_wire
from edgeshard_agent.store.blob_cache import BlobCache, Pin

log = structlog.get_logger()

Progress = Callable[[int, int], None]
"""Called on the event loop with (bytes that are here, bytes in all); the first may fall when a
download was damaged."""

_DAMAGED_DOWNLOADS = 3
_COORDINATOR = "the coordinator's model store"


@dataclass(frozen=True, slots=True)
class Retries:
    """`attempts` in a row that bring no byte are given up; the wait between them doubles, in
    seconds.

    A stream that is silent for `stall_s` counts as broken.
    """

    attempts: int = 8
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0
    stall_s: float = 30.0


@dataclass(slots=True)
class _Tally:
    """Bytes here, summed over the blobs of one fetch."""

    total: int
    progress: Progress | None
    done: int = 0
    by_blob: dict[Digest, int] = field(default_factory=dict)

    def set(self, digest: Digest, size: int) -> None:
        self.done += size - self.by_blob.get(digest, 0)
        self.by_blob[digest] = size
        if self.progress is not None:
            self.progress(self.done, self.total)


class Fetcher:
    """Fetches a stage's missing blobs into `cache` over `channel`, `parallel` blobs at a time."""

    def __init__(
        self,
        cache: BlobCache,
        channel: grpc.aio.Channel,
        *,
        parallel: int = 4,
        retries: Retries | None = None,
    ) -> None:
        self._cache = cache
        self._stub = store_pb2_grpc.ModelStoreServiceStub(channel)
        self._parallel = parallel
        self._retries = retries or Retries()

    async def manifest(self, digest: Digest) -> ModelManifest:
        """The manifest of that digest; from the cache without any call when it is there.

        Raises NotFoundError when the coordinator has none, DataLossError when it sends another,
        UnavailableError.
        """
        cached = await self._cache.manifest(digest)
        if cached is not None:
            return cached
        request = pb.GetManifestRequest(model=digest)
        for failures in itertools.count(1):
            try:
                response = await self._stub.GetManifest(request, timeout=self._retries.stall_s)
                break
            except grpc.aio.AioRpcError as error:
                await self._wait(from_rpc_error(error, _COORDINATOR), failures)
        manifest = await in_thread(manifest_from_wire, response.manifest)
        if manifest.digest() != digest:
            raise DataLossError(
                f"the coordinator sent another manifest than {digest}; deploy the model again",
                field="manifest_digest",
            )
        await self._cache.keep_manifest(digest, manifest)
        return manifest

    async def fetch(
        self, items: Iterable[TensorInfo | FileInfo], progress: Progress | None = None
    ) -> Pin:
        """Have the blobs of these tensors and files in the cache, verified and pinned; the caller
        releases the pin.

        A cached file is checked against its sha256 and needs no call; a damaged file is fetched
        again. Weights in linked files of a shared store are checked when they are read. A broken
        download continues from its last byte, also after a restart of the process.

        Raises ResourceExhaustedError (cache-limit, or a full disk), DataLossError naming the tensor
        when its bytes stay wrong, NotFoundError, UnavailableError. The data that arrived until then
        is kept for the next try.
        """
        items = tuple(items)
        sizes = blob_sizes(items)
        names = {item.sha256: item.name for item in items}
        small = {item.sha256 for item in items if isinstance(item, FileInfo)}
        self._check_limit(sizes, names)
        await in_thread(self._cache.check_room, sizes)
        tally = _Tally(sum(sizes.values()), progress)
        pin = self._cache.pin(sizes)
        queue = iter(sizes.items())

        async def work() -> None:
            for digest, size in queue:
                await self._ensure(
                    digest, size, names[digest], tally, is_weights=digest not in small
                )

        workers = [asyncio.ensure_future(work()) for _ in range(self._parallel)]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for worker in workers:
                worker.cancel()
            try:
                await asyncio.wait(workers)
            finally:  # it may be called off while it ends
                pin.release()
            raise
        return pin

    def _check_limit(self, sizes: dict[Digest, int], names: dict[Digest, str]) -> None:
        """Refuse before the first byte what can never fit."""
        limit, total = self._cache.limit_bytes, sum(sizes.values())
        if total <= limit:
            return
        largest = max(sizes, key=lambda digest: sizes[digest])
        what = (
            f"{names[largest]} has {sizes[largest]} bytes"
            if sizes[largest] > limit
            else f"the stage has {total}"
        )
        raise self._cache.too_small(what)

    async def _ensure(
        self, digest: Digest, size: int, name: str, tally: _Tally, *, is_weights: bool
    ) -> None:
        async with self._cache.lock(digest):
            if not await self._cache.is_intact(digest, size, is_weights=is_weights):
                await self._cache.reserve(digest, size)
                try:
                    await self._download(digest, size, name, tally)
                finally:
                    await self._cache.settle(digest)
            tally.set(digest, size)

    async def _download(self, digest: Digest, size: int, name: str, tally: _Tally) -> None:
        failures = damaged = 0
        while True:
            start = await in_thread(self._cache.blobs.received, digest)
            # More than the blob can have is not a beginning of it.
            start = start if start <= size else 0
            await in_thread(self._cache.blobs.truncate, digest, start)
            tally.set(digest, start)
            try:
                if start < size:
                    await self._receive(digest, start, size, tally)
                await in_thread(self._cache.blobs.commit, digest, size)
                return
            except DataLossError as error:
                if error.reason == CHANGED_SINCE_ADDED:
                    raise
                damaged += 1
                log.warning("download_damaged", digest=digest, tensor=name, attempt=damaged)
                await in_thread(self._cache.blobs.truncate, digest, 0)
                if damaged >= _DAMAGED_DOWNLOADS or error.reason == "STORED_BLOB_DAMAGED":
                    raise DataLossError(
                        f"{name} arrived damaged: {error.message}",
                        field=name,
                        reason="CORRUPT_TENSOR",
                    ) from None
            except UnavailableError as error:
                failures = (
                    1
                    if await in_thread(self._cache.blobs.received, digest) > start
                    else failures + 1
                )
                await self._wait(error, failures)

    async def _receive(self, digest: Digest, start: int, size: int, tally: _Tally) -> None:
        """Append bytes [start, size) to the partial file. Raises UnavailableError when the stream
        breaks."""
        offset = start
        call = self._stub.ReadBlob(blob_range_to_wire(BlobRange(digest, start, size - start)))
        try:
            while True:
                async with asyncio.timeout(self._retries.stall_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    break
                if offset + len(message.data) > size:
                    raise DataLossError(
                        f"the coordinator sent more than the {size} bytes of blob {digest}"
                    )
                await in_thread(self._cache.blobs.write, digest, offset, message.data)
                offset += len(message.data)
                tally.set(digest, offset)
            status = await call.code()
            if status is not grpc.StatusCode.OK or offset < size:
                raise UnavailableError(
                    f"{_COORDINATOR} ended the stream at byte {offset} of {size}"
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, _COORDINATOR) from None
        except TimeoutError:
            raise UnavailableError(
                f"{_COORDINATOR} sent nothing for {self._retries.stall_s:g} s"
            ) from None
        except asyncio.CancelledError:
            # A call that the other side cancels looks like a cancel of this task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnavailableError(f"{_COORDINATOR} broke off the stream") from None
        finally:
            call.cancel()

    async def _wait(self, error: EdgeShardError, failures: int) -> None:
        """Sleep before the next attempt; raise `error` if there is no attempt left or another would
        not help."""
        if not isinstance(error, UnavailableError) or failures >= self._retries.attempts:
            raise error
        await asyncio.sleep(
            min(self._retries.first_wait_s * 2 ** (failures - 1), self._retries.longest_wait_s)
        )
