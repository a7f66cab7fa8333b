"""The model store over gRPC. Files are read, written and hashed in threads, never on the loop."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import structlog

from edgeshard.domain import errors
from edgeshard.domain.control.site import BlobHeader, LocalAdding, ModelRegistration
from edgeshard.domain.ids import Digest
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.proto.v1 import store_pb2_grpc
from edgeshard.rpc.addresses import is_of_this_machine
from edgeshard.rpc.hello import first_message
from edgeshard.storage.blobs import CHUNK_BYTES, in_thread
from edgeshard.storage.files import check_room
from edgeshard.storage.local_model import not_this_machine
from edgeshard.wire import store as wire
from edgeshard_coordinator.store.models import ModelStore

log = structlog.get_logger()

_SHOWN_EVERY_S = 0.1


class ModelStoreServicer(store_pb2_grpc.ModelStoreServiceServicer):
    """Serves one `ModelStore`, which must be open. Typed errors leave through the server's error
    interceptor."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self._uploading: dict[Digest, int] = {}
        """Bytes that are still to come of each blob that is being sent."""

    async def RegisterModel(
        self, request: pb.RegisterModelRequest, context: Any
    ) -> pb.RegisterModelResponse:
        def register() -> ModelRegistration:
            manifest = wire.manifest_from_wire(request.manifest)
            digest, missing = self._store.register(manifest)
            if not missing:
                log.info("model_registered", model=manifest.name, digest=digest)
            return ModelRegistration(not missing, digest, missing)

        return wire.model_registration_to_wire(await in_thread(register))

    async def AddLocalModel(
        self, request: pb.AddLocalModelRequest, context: Any
    ) -> AsyncIterator[pb.AddLocalModelResponse]:
        """Hashes in a thread, which ends at its next chunk when the caller goes."""
        if not is_of_this_machine(_host_of(context.peer())):
            raise not_this_machine()
        model = await in_thread(lambda: wire.local_model_from_wire(request))
        ended = threading.Event()
        status = LocalAdding(0, model.manifest.stored_bytes, knows_orders=True)

        def progress(hashed: int, total: int) -> None:
            nonlocal status
            if ended.is_set():
                raise errors.AbortedError(f"adding model {model.manifest.name} was cancelled")
            status = LocalAdding(hashed, total, knows_orders=True)

        adding = asyncio.ensure_future(in_thread(self._store.add_local, model, progress))
        try:
            while not adding.done():
                yield wire.local_adding_to_wire(status)
                await asyncio.wait([adding], timeout=_SHOWN_EVERY_S)
            digest = adding.result()
            log.info("model_registered", model=model.manifest.name, digest=digest)
            yield wire.local_adding_to_wire(
                LocalAdding(status.total, status.total, digest, knows_orders=True)
            )
        finally:
            ended.set()
            await asyncio.wait([adding])

    async def PutBlob(
        self, request_iterator: AsyncIterator[pb.PutBlobRequest], context: Any
    ) -> pb.PutBlobResponse:
        first = await first_message(request_iterator, "header", "an upload")
        if first is None or not first.HasField("header"):
            raise errors.InvalidArgumentError(
                "the first message of an upload must carry its header", field="header"
            )
        header = wire.blob_header_from_wire(first.header)
        digest = header.digest
        if await asyncio.to_thread(self._store.blobs.size, digest) == header.size:
            return pb.PutBlobResponse(size=header.size)
        if digest in self._uploading:
            raise errors.AbortedError(
                f"blob {digest} is being uploaded by another client; try again",
                reason="UPLOAD_IN_PROGRESS",
                retry_after_s=0.5,
            )
        self._uploading[digest] = 0
        try:
            await self._upload(digest, header, first, request_iterator)
        finally:
            del self._uploading[digest]
        return pb.PutBlobResponse(size=header.size)

    async def _upload(
        self,
        digest: Digest,
        header: BlobHeader,
        first: pb.PutBlobRequest,
        rest: AsyncIterator[pb.PutBlobRequest],
    ) -> None:
        try:
            await self._check_upload(digest, header)
            await self._receive(digest, header, first, rest)
        except errors.ResourceExhaustedError:
            self._store.give_up(digest)
            raise
        finally:
            if self._store.expected_size(digest) is None:
                # The disk is full: this upload, or one beside it, cannot be completed, and others
                # need the room more.
                await in_thread(self._store.blobs.forget_received, digest)

    async def _check_upload(self, digest: Digest, header: BlobHeader) -> None:
        expected = self._store.expected_size(digest)
        if expected is None:
            # Otherwise anyone could fill the disk with bytes that belong to no model.
            raise errors.FailedPreconditionError(
                f"blob {digest} belongs to no model being added: register its manifest first",
                field="sha256",
                reason="BLOB_NOT_EXPECTED",
            )
        if header.size != expected:
            raise errors.InvalidArgumentError(
                f"blob {digest} has {expected} bytes, not {header.size}", field="size"
            )
        received = await asyncio.to_thread(self._store.blobs.received, digest)
        if header.offset > min(received, expected):
            raise errors.AbortedError(
                f"the store has {received} bytes of blob {digest}, so an upload cannot begin at "
                f"{header.offset}: register again to get the offset",
                field="offset",
                reason="WRONG_OFFSET",
            )
        coming, room = header.size - header.offset, await asyncio.to_thread(self._store.room_bytes)
        others = sum(self._uploading.values())
        check_room(self._store.blobs.path(digest), f"blob {digest}", coming, room - others)
        self._uploading[digest] = coming

    async def _receive(
        self,
        digest: Digest,
        header: BlobHeader,
        first: pb.PutBlobRequest,
        rest: AsyncIterator[pb.PutBlobRequest],
    ) -> None:
        blobs, offset = self._store.blobs, header.offset
        await in_thread(blobs.truncate, digest, offset)
        message: pb.PutBlobRequest | None = first
        while message is not None:
            data = message.data
            if offset + len(data) > header.size:
                raise errors.InvalidArgumentError(
                    f"blob {digest} has more than its {header.size} bytes", field="data"
                )
            if data:
                await in_thread(blobs.write, digest, offset, data)
                offset += len(data)
                self._uploading[digest] = header.size - offset
            message = await anext(rest, None)
        if offset < header.size:
            # The bytes stay: the next upload begins where this one ended.
            raise errors.AbortedError(
                f"the upload of blob {digest} ended at byte {offset} of {header.size}", field="data"
            )
        await in_thread(blobs.commit, digest, header.size)

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: Any
    ) -> pb.GetManifestResponse:
        manifest, digest = self._store.get(request.model)
        return pb.GetManifestResponse(
            manifest=wire.manifest_to_wire(manifest), manifest_digest=digest
        )

    async def ReadBlob(
        self, request: pb.ReadBlobRequest, context: Any
    ) -> AsyncIterator[pb.ReadBlobResponse]:
        blob = wire.blob_range_from_wire(request)
        digest = blob.digest
        size = await asyncio.to_thread(self._store.blobs.size, digest)
        if size is None:
            raise self._store.blobs.missing(digest)
        if blob.offset > size or blob.length > size - blob.offset:
            raise errors.InvalidArgumentError(
                f"blob {digest} has {size} bytes; the range ends beyond", field="offset"
            )
        offset, end = blob.offset, blob.offset + blob.length if blob.length else size
        # A whole blob is checked in passing, so that decay on this disk is found and named here.
        sha256 = hashlib.sha256() if offset == 0 and end == size else None
        while offset < end:
            data = await asyncio.to_thread(
                self._store.blobs.read, digest, offset, min(CHUNK_BYTES, end - offset)
            )
            if not data:
                raise errors.DataLossError(
                    f"blob {digest} became shorter while it was read; try again", field="sha256"
                )
            if sha256 is not None:
                await asyncio.to_thread(sha256.update, data)
            offset += len(data)
            if sha256 is not None and offset == end and sha256.hexdigest() != digest:
                log.error("blob_damaged", digest=digest)
                if (
                    changed := await in_thread(self._store.blobs.linked.distrust, digest)
                ) is not None:
                    raise changed
                await in_thread(self._store.blobs.remove, digest)
                raise errors.DataLossError(
                    f"the coordinator's copy of blob {digest} is damaged: add its model again",
                    field="sha256",
                    reason="STORED_BLOB_DAMAGED",
                )
            yield pb.ReadBlobResponse(data=data)


def _host_of(peer: str) -> str:
    """The address in gRPC's name of a peer, such as ipv4:127.0.0.1:4711; '' of one without an
    address."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
