"""A disk that is short or full: uploads are refused before they fill it, and leave nothing half
done on it."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.store import ModelStore

from edgeshard.client.uploads import add_model
from edgeshard.domain.errors import Code, ResourceExhaustedError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import TensorInfo
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.proto.v1.store_pb2_grpc import ModelStoreServiceStub
from edgeshard.storage.blobs import BlobDirectory
from edgeshard.storage.checkpoint import build_manifest, open_checkpoint
from edgeshard.storage.files import write_atomically
from edgeshard.wire.status import from_rpc_error
from edgeshard.wire.store import manifest_to_wire

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
FULL = Path("/dev/full")
WEEK_S = 7 * 24 * 3600

needs_full = pytest.mark.skipif(
    not FULL.exists(), reason="this system has no device that is always full"
)


class FullBlobs(BlobDirectory):
    """The data of one blob goes to a device that is always full."""

    def __init__(self, root: Path, full: Digest) -> None:
        super().__init__(root)
        self.full = full

    def truncate(self, digest: Digest, size: int) -> None:
        super().truncate(digest, size)
        if digest == self.full:
            partial = self.partial_path(digest)
            partial.unlink()
            partial.symlink_to(FULL)


def left_under(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_symlink() or path.is_file())


async def registering(
    server: Any, directory: Path, connect: Connect
) -> tuple[ModelStoreServiceStub, list[TensorInfo]]:
    """A model whose blobs are awaited, and its tensors."""
    manifest = build_manifest("tiny", open_checkpoint(directory))
    stub = ModelStoreServiceStub(connect(server.address))
    await stub.RegisterModel(pb.RegisterModelRequest(manifest=manifest_to_wire(manifest)))
    return stub, sorted(manifest.tensors, key=lambda tensor: -tensor.stored_bytes)


async def test_a_model_that_the_disk_has_no_room_for_is_refused_before_a_byte_is_sent(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    server.store._kept_free_bytes = 1 << 62
    directory = make_checkpoint()
    needed = build_manifest("tiny", open_checkpoint(directory)).stored_bytes
    with pytest.raises(ResourceExhaustedError) as caught:
        await add_model(connect(server.address), directory, "tiny")
    assert caught.value.reason == "DISK_FULL" and caught.value.field == "state-dir"
    assert (
        str(tmp_path / "coordinator") in caught.value.message
        and str(needed) in caught.value.message
    )
    assert server.servicer.put_bytes == 0 and not left_under(tmp_path / "coordinator")
    server.store._kept_free_bytes = 0
    await add_model(connect(server.address), directory, "tiny")


@needs_full
async def test_an_upload_that_fills_the_disk_is_refused_and_leaves_nothing(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    tmp_path: Path,
    until: Until,
) -> None:
    server = await run_store()
    directory, whole = make_checkpoint(), server.store.blobs
    stub, (one, other, *_) = await registering(server, directory, connect)
    server.store.blobs = FullBlobs(tmp_path / "coordinator" / "blobs", one.sha256)
    beside = stub.PutBlob()
    header = pb.BlobHeader(sha256=other.sha256, size=other.stored_bytes)
    await beside.write(pb.PutBlobRequest(header=header, data=b"1234"))
    await until(lambda: server.store.blobs.received(other.sha256) == 4)
    call = stub.PutBlob()
    header = pb.BlobHeader(sha256=one.sha256, size=one.stored_bytes)
    await call.write(pb.PutBlobRequest(header=header, data=bytes(one.stored_bytes)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert (
        isinstance(error, ResourceExhaustedError)
        and error.reason == "DISK_FULL"
        and error.field == "state-dir"
    )
    assert str(tmp_path / "coordinator") in error.message and "bytes are free" in error.message
    beside.cancel()  # as a client does whose model cannot be added
    await until(lambda: not left_under(tmp_path / "coordinator"))
    server.store.blobs = whole
    await add_model(connect(server.address), directory, "tiny")


async def test_uploads_side_by_side_are_counted_together(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, until: Until
) -> None:
    server = await run_store()
    stub, (one, other, *_) = await registering(server, make_checkpoint(), connect)
    server.store.room_bytes = lambda: one.stored_bytes + other.stored_bytes - 1
    first = stub.PutBlob()
    header = pb.BlobHeader(sha256=one.sha256, size=one.stored_bytes)
    await first.write(pb.PutBlobRequest(header=header))
    await until(lambda: server.servicer._uploading.get(one.sha256) == one.stored_bytes)
    second = stub.PutBlob()
    await second.write(
        pb.PutBlobRequest(header=pb.BlobHeader(sha256=other.sha256, size=other.stored_bytes))
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second
    assert from_rpc_error(caught.value).code == Code.RESOURCE_EXHAUSTED
    first.cancel()


@pytest.mark.parametrize("why", ["given up long ago", "the disk is short"])
async def test_what_an_upload_left_is_removed_at_the_next_start(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path, why: str
) -> None:
    """Also if there is nothing newer to compare its age with."""
    server = await run_store()
    _, (tensor, *_) = await registering(server, make_checkpoint(), connect)
    partial = server.store.blobs.partial_path(tensor.sha256)
    server.store.blobs.truncate(tensor.sha256, 0)
    server.store.blobs.write(tensor.sha256, 0, b"1234")
    temporary = tmp_path / "coordinator" / "names.json.tmp"
    temporary.write_text("{")
    await server.stop()

    ModelStore(tmp_path / "coordinator").open()
    assert partial.exists() and not temporary.exists(), "an upload goes on where it stopped"
    if why == "given up long ago":
        long_ago = time.time() - WEEK_S - 3600
        os.utime(partial, (long_ago, long_ago))
        ModelStore(tmp_path / "coordinator").open()
    else:
        ModelStore(tmp_path / "coordinator", kept_free_bytes=1 << 62).open()
    assert not partial.exists()


async def test_what_an_upload_left_makes_room_for_the_next_model(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    _, (tensor, *_) = await registering(server, make_checkpoint("given-up"), connect)
    server.store.blobs.truncate(tensor.sha256, tensor.stored_bytes)
    partial = server.store.blobs.partial_path(tensor.sha256)
    await server.stop()
    again = await run_store()
    again.store.room_bytes = lambda: 0 if partial.exists() else 1 << 40
    await add_model(connect(again.address), make_checkpoint("next", seed=1), "next")
    assert not partial.exists() and again.store.get("next")


@needs_full
async def test_a_model_can_be_deleted_when_the_disk_is_full(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    """Unneeded blobs are deleted first, which makes space for the list of names."""
    server = await run_store()
    await add_model(connect(server.address), make_checkpoint(), "tiny")
    (tmp_path / "coordinator" / "names.json.tmp").symlink_to(FULL)
    server.store.delete("tiny")
    assert left_under(tmp_path / "coordinator") == ["names.json"]


@needs_full
def test_a_text_that_cannot_be_written_leaves_the_old_one_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    write_atomically(path, "old")
    (tmp_path / "names.json.tmp").symlink_to(FULL)
    with pytest.raises(ResourceExhaustedError):
        write_atomically(path, "new")
    assert path.read_text() == "old" and left_under(tmp_path) == ["names.json"]
