"""Adding a local model to the coordinator's store: hash, register, send what is missing, register
again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import grpc

from edgeshard.domain.control.site import BlobHeader, MissingBlob, ModelRegistration
from edgeshard.domain.errors import (
    AbortedError,
    DataLossError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from edgeshard.domain.ids import Digest, check_name
from edgeshard.importing.blocks import Width
from edgeshard.importing.imported import CHECKING, CONVERTING, DOWNLOADING, Imported
from edgeshard.importing.model_sources import Source, named_source, opened
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.proto.v1 import store_pb2_grpc
from edgeshard.rpc.channel import MESSAGE_LIMIT_BYTES, half_close
from edgeshard.storage.blobs import CHUNK_BYTES, in_thread
from edgeshard.storage.checkpoint import Checkpoint, blob_locations, build_manifest, draft_manifest
from edgeshard.storage.local_model import NOT_THIS_MACHINE, local_model
from edgeshard.storage.locations import BlobLocation, read_chunks
from edgeshard.wire.status import from_rpc_error
from edgeshard.wire.store import (
    blob_header_to_wire,
    local_adding_from_wire,
    local_model_to_wire,
    manifest_to_wire,
    model_registration_from_wire,
)

_PARALLEL_UPLOADS = 4
_ATTEMPTS = 6
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0
# Errors that another round of asking and sending may cure. A damaged upload is sent again from its
# beginning.
_CURABLE = (UnavailableError, AbortedError, FailedPreconditionError, DataLossError)


class AddPhase(StrEnum):
    DOWNLOADING = DOWNLOADING
    CHECKING = CHECKING
    CONVERTING = CONVERTING
    HASHING = "hashing"
    UPLOADING = "uploading"


Progress = Callable[[AddPhase, int, int], None]
"""Called on the event loop with (phase, bytes done, bytes in all)."""


class _StoppedError(Exception):
    """The end of a thread that no caller waits for any more."""


def _reporter(progress: Progress | None) -> tuple[Callable[[str, int, int], None], threading.Event]:
    """A call by which a thread reports its progress to this loop, and the event that ends the
    thread there."""
    loop, stopped = asyncio.get_running_loop(), threading.Event()

    def report(what: str, done: int, total: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        if progress is not None:
            loop.call_soon_threadsafe(progress, AddPhase(what), done, total)

    return report, stopped


@dataclass(frozen=True, slots=True)
class Adding:
    """How a model is made ready. `width` is for weights that cannot be kept exactly as they are;
    `on_note` is called with what an operator should know, such as what that lost."""

    width: Width = Width.INT8
    on_note: Callable[[str], None] | None = None


async def add_model(
    channel: grpc.aio.Channel,
    source: Path | str,
    name: str | None = None,
    progress: Progress | None = None,
    *,
    here: bool = False,
    adding: Adding = Adding(),
) -> Digest:
    """Register a model as `name` (default: what the source is called); its digest.

    A path is a checkpoint's directory or a GGUF file; a text may be any that `parse_source` reads,
    too.

    Raises as `parse_source`, `opened` and `add_checkpoint` do.
    """
    where, name = named_source(source, name)
    async with _prepared(where, adding.width, progress) as imported:
        if adding.on_note is not None:
            for note in imported.notes_as(name):
                adding.on_note(note)
        return await add_checkpoint(channel, imported.checkpoint, name, progress, here=here)


@asynccontextmanager
async def _prepared(
    source: Source, width: Width, progress: Progress | None
) -> AsyncIterator[Imported]:
    """The opened source. A thread prepares it, and ends soon after the caller stops waiting."""
    report, stopped = _reporter(progress)
    with ExitStack() as stack:
        opening = asyncio.ensure_future(
            asyncio.to_thread(stack.enter_context, opened(source, width, report))
        )
        try:
            imported = await asyncio.shield(opening)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait([opening])
            if not opening.cancelled():
                opening.exception()
            raise
        yield imported


async def add_checkpoint(
    channel: grpc.aio.Channel,
    checkpoint: Checkpoint,
    name: str,
    progress: Progress | None = None,
    *,
    here: bool = False,
) -> Digest:
    """Register an open checkpoint as `name`; its digest.

    `here` means that the coordinator's address is of this machine: it uses the files in their
    place then, and hashes them itself. Adding the same content again sends nothing and succeeds.
    An interrupted upload resumes by itself after a broken connection, and with the next call after
    a cancel.

    Raises as `build_manifest` does before anything is sent; AlreadyExistsError when the name has
    other content; UnavailableError when the coordinator cannot be reached.
    """
    check_name(name, "name")
    if here:
        digest = await _add_here(channel, checkpoint, name, progress)
        if digest is not None:
            return digest
    report, stopped = _reporter(progress)
    try:
        manifest = await asyncio.to_thread(
            build_manifest, name, checkpoint, partial(report, AddPhase.HASHING)
        )
    finally:
        stopped.set()
    request = pb.RegisterModelRequest(manifest=manifest_to_wire(manifest))
    if request.ByteSize() > MESSAGE_LIMIT_BYTES - 1024:
        raise InvalidArgumentError(
            f"the manifest has {request.ByteSize()} bytes; at most {MESSAGE_LIMIT_BYTES} can be "
            "sent",
            field="directory",
        )
    upload = _Upload(channel, request, blob_locations(checkpoint, manifest), progress)
    return await upload.run()


async def _add_here(
    channel: grpc.aio.Channel, checkpoint: Checkpoint, name: str, progress: Progress | None
) -> Digest | None:
    """The digest; None if the coordinator does not see the same files: in a container, as another
    user."""
    model = await in_thread(lambda: local_model(checkpoint, draft_manifest(name, checkpoint)))
    request = local_model_to_wire(model)
    if request.ByteSize() > MESSAGE_LIMIT_BYTES - 1024:
        return None
    try:
        async for message in store_pb2_grpc.ModelStoreServiceStub(channel).AddLocalModel(request):
            adding = local_adding_from_wire(message)
            if progress is not None:
                progress(AddPhase.HASHING, adding.hashed, adding.total)
            if not adding.knows_orders and any(place.order for place in model.places):
                return None  # an older coordinator would take the rows as they lie
            if adding.manifest_digest is not None:
                return adding.manifest_digest
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error, "the coordinator")
        if refused.reason == NOT_THIS_MACHINE or error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise refused from None
    raise UnavailableError("the coordinator ended the call before the model was added; try again")


class _Upload:
    """Sends the blobs of one manifest until the coordinator reports that it is registered."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        request: pb.RegisterModelRequest,
        locations: Mapping[Digest, BlobLocation],
        progress: Progress | None,
    ) -> None:
        self._stub = store_pb2_grpc.ModelStoreServiceStub(channel)
        self._request = request
        self._locations = locations
        self._progress = progress
        self._total = sum(location.size for location in locations.values())
        self._remaining: dict[Digest, int] = {}

    async def run(self) -> Digest:
        response = await self._register()
        failures, least = 0, self._total + 1
        while not response.registered:
            try:
                await self._send_missing(response.missing)
                response = await self._register()
            except _CURABLE:
                # Rounds that bring bytes across do not count against the attempts.
                remaining = sum(self._remaining.values())
                failures, least = (1, remaining) if remaining < least else (failures + 1, least)
                if failures >= _ATTEMPTS:
                    raise
                await asyncio.sleep(min(_FIRST_BACKOFF_S * 2 ** (failures - 1), _LONGEST_BACKOFF_S))
                with suppress(UnavailableError):  # another round follows
                    response = await self._register()
        self._remaining = {}
        self._report()
        return response.manifest_digest

    async def _register(self) -> ModelRegistration:
        try:
            response = await self._stub.RegisterModel(self._request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the coordinator") from None
        return model_registration_from_wire(response)

    async def _send_missing(self, missing: Iterable[MissingBlob]) -> None:
        missing = list(missing)
        self._remaining = {blob.digest: blob.size - blob.received for blob in missing}
        self._report()
        queue = iter(missing)

        async def send_from_queue() -> None:
            for blob in queue:
                await self._send(blob)

        workers = [asyncio.ensure_future(send_from_queue()) for _ in range(_PARALLEL_UPLOADS)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _send(self, blob: MissingBlob) -> None:
        digest = blob.digest
        location = self._locations.get(digest)
        if location is None or blob.received > location.size:
            raise InternalError(
                f"the coordinator requested blob {digest[:80]}, which is not part of this model"
            )
        chunks = read_chunks(location, f"blob {digest}", CHUNK_BYTES, blob.received)
        call = self._stub.PutBlob()
        try:
            # A call may end while it is written to. Its status has the reason, or another client
            # had sent the blob.
            with suppress(asyncio.InvalidStateError):
                header = BlobHeader(digest, location.size, blob.received)
                await call.write(pb.PutBlobRequest(header=blob_header_to_wire(header)))
                while chunk := await in_thread(next, chunks, b""):
                    await call.write(pb.PutBlobRequest(data=chunk))
                    self._remaining[digest] -= len(chunk)
                    self._report()
                await half_close(call)
            await call
        except grpc.aio.AioRpcError as error:
            raise _upload_error(error) from None
        except asyncio.CancelledError:
            # A call that the other side cancels looks like a cancel of this task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnavailableError("the coordinator ended the upload early") from None
        finally:
            call.cancel()
            chunks.close()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(
                AddPhase.UPLOADING, self._total - sum(self._remaining.values()), self._total
            )


def _upload_error(error: grpc.aio.AioRpcError) -> EdgeShardError:
    # grpcio calls a write into a connection that has just broken an internal error of its own.
    if error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata():
        return UnavailableError("the coordinator ended the upload early")
    return from_rpc_error(error, "the coordinator")
