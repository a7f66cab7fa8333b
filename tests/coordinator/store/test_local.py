"""Models on the coordinator's own machine: linked into the store, hashed once, and refused if they
have changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from gguf import GGMLQuantizationType as Type

from edgeshard.client.uploads import AddPhase, add_model
from edgeshard.domain.control.site import LocalAdding, LocalModel, LocalPlace, WeightsFile
from edgeshard.domain.errors import AlreadyExistsError, EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import RowOrder, TensorInfo
from edgeshard.proto.v1.store_pb2_grpc import ModelStoreServiceStub
from edgeshard.rpc.addresses import is_of_this_machine
from edgeshard.storage.blobs import manifest_items
from edgeshard.storage.checkpoint import build_manifest, draft_manifest, open_checkpoint
from edgeshard.storage.local_model import NOT_THIS_MACHINE, local_model
from edgeshard.wire.status import from_rpc_error
from edgeshard.wire.store import local_model_to_wire
from tests.support.gguf_files import everywhere, write_demo_gguf

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]


def described(directory: Path, name: str = "tiny") -> LocalModel:
    checkpoint = open_checkpoint(directory)
    return local_model(checkpoint, draft_manifest(name, checkpoint))


async def refusal(channel: grpc.aio.Channel, model: LocalModel) -> EdgeShardError:
    try:
        async for _ in ModelStoreServiceStub(channel).AddLocalModel(local_model_to_wire(model)):
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it was added")


async def test_a_model_is_linked_not_sent(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server, directory = await run_store(), make_checkpoint()
    shown: list[tuple[AddPhase, int, int]] = []
    digest = await add_model(
        connect(server.address), directory, "tiny", lambda *step: shown.append(step), here=True
    )
    expected = build_manifest("tiny", open_checkpoint(directory))
    assert digest == expected.digest() and server.store.get("tiny")[0] == expected
    assert {phase for phase, _, _ in shown} == {AddPhase.HASHING}
    assert shown[-1][1:] == (expected.stored_bytes, expected.stored_bytes)
    weights = directory / "model.safetensors"
    assert weights.stat().st_nlink == 2, "linked into the store"
    for item in manifest_items(expected):
        found = server.store.blobs.locate(item.sha256)
        assert found is not None and found.is_linked == isinstance(item, TensorInfo)
        assert server.store.blobs.is_intact(item.sha256, found.size)
    assert await add_model(connect(server.address), directory, "tiny", here=True) == digest, (
        "twice is once"
    )
    assert weights.stat().st_nlink == 2
    server.store.delete("tiny")
    assert weights.stat().st_nlink == 1
    assert not [path for path in server.store.blobs.linked.directory.iterdir() if path.is_file()]
    assert not [*server.store.blobs.files()]


async def test_blobs_that_another_model_has_are_not_noted_twice(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server, directory = await run_store(), make_checkpoint()
    channel = connect(server.address)
    await add_model(channel, directory, "sent")
    await add_model(channel, directory, "linked", here=True)
    assert (directory / "model.safetensors").stat().st_nlink == 1
    server.store.delete("sent")
    manifest, _ = server.store.get("linked")
    assert all(
        server.store.blobs.size(item.sha256) is not None for item in manifest_items(manifest)
    )


async def test_files_that_are_not_these_here_are_sent(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, directory = await run_store(), make_checkpoint()
    channel, model = connect(server.address), described(directory)
    file = model.files[0]
    others = [
        replace(file, inode=file.inode + 1),
        replace(file, device=file.device + 1),
        replace(file, modified_ns=file.modified_ns + 1),
        replace(file, head_sha256=Digest("0" * 64)),
        replace(file, path=f"{file.path}x"),
        replace(file, path="model.safetensors"),
        replace(file, path=str(directory)),
        replace(file, path="/dev/zero"),
    ]
    for other in others:
        error = await refusal(channel, replace(model, files=(other, *model.files[1:])))
        assert error.reason == NOT_THIS_MACHINE and str(directory) not in error.message
    assert server.store.list() == () and not [*server.store.blobs.linked._files()]
    monkeypatch.setattr(
        "edgeshard.client.uploads.local_model",
        lambda *_: replace(model, files=(others[0], *model.files[1:])),
    )
    shown: set[AddPhase] = set()
    await add_model(channel, directory, "tiny", lambda phase, *_: shown.add(phase), here=True)
    assert shown == {AddPhase.HASHING, AddPhase.UPLOADING} and server.store.get("tiny")


async def test_places_outside_of_the_files_are_refused(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server, directory = await run_store(), make_checkpoint()
    channel, model = connect(server.address), described(directory)
    first = model.places[0]
    size = model.files[first.file].size
    for places in (
        model.places[1:],
        (LocalPlace(99, 0), *model.places[1:]),
        (replace(first, offset=size - 1), *model.places[1:]),
        (replace(first, order=RowOrder(2, 3, 5)), *model.places[1:]),
        (replace(first, order=RowOrder(0, 0, 0)), *model.places[1:]),
        (*model.places[:-1], model.places[0]),
        (model.places[-1], *model.places[1:]),
    ):
        error = await refusal(channel, replace(model, places=places))
        assert isinstance(error, InvalidArgumentError) and error.field == "places", places
    assert server.store.list() == () and not [*server.store.blobs.linked._files()]


async def test_a_taken_name_is_refused_and_leaves_nothing(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server, directory = await run_store(), make_checkpoint()
    channel = connect(server.address)
    await add_model(channel, directory, "tiny", here=True)
    other = make_checkpoint("other", seed=7)
    with pytest.raises(AlreadyExistsError):
        await add_model(channel, other, "tiny", here=True)
    assert (other / "model.safetensors").stat().st_nlink == 1


def test_which_addresses_are_of_this_machine() -> None:
    assert (
        is_of_this_machine("127.0.0.1")
        and is_of_this_machine("localhost")
        and is_of_this_machine("::1")
    )
    assert not is_of_this_machine("192.0.2.1") and not is_of_this_machine("no such host")


@pytest.mark.usefixtures("no_links")
async def test_links_of_the_hubs_cache_lead_to_the_files_that_are_read_in_place(
    run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    snapshot = tmp_path / "models--a--demo" / "snapshots" / "0"
    blobs = tmp_path / "models--a--demo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    path = write_demo_gguf(blobs / ("5" * 64), everywhere(Type.Q8_0))
    (snapshot / "demo.gguf").symlink_to(Path("../../blobs", path.name))
    await add_model(connect(server.address), snapshot / "demo.gguf", here=True)
    manifest, _ = server.store.get("demo")
    weights = sum(tensor.stored_bytes for tensor in manifest.tensors)
    assert server.store.weights_files(manifest) == (WeightsFile(str(path), weights, True, False),)
    path.unlink()
    assert server.store.weights_files(manifest) == (WeightsFile(str(path), weights, True, True),)
    server.store.delete("demo")
    assert not [*server.store.blobs.linked.directory.iterdir()]


async def test_a_coordinator_that_knows_no_orders_of_rows_is_sent_the_rows_in_order(
    run_store: RunStore, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an earlier version would take the rows as they lie in the file."""
    server = await run_store()
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(Type.Q8_0))
    expected = await add_model(connect(server.address), path, "here", here=True)
    monkeypatch.setattr(
        "edgeshard_coordinator.store.servicer.LocalAdding",
        lambda *values, knows_orders: LocalAdding(*values),
    )
    server.store.delete("here")
    shown: set[AddPhase] = set()
    digest = await add_model(
        connect(server.address), path, "sent", lambda phase, *_: shown.add(phase), here=True
    )
    assert digest == expected and AddPhase.UPLOADING in shown
