"""The coordinator's store over a real server: adding, resuming, refusing, deleting, surviving."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeshard.client.uploads import AddPhase, add_model
from edgeshard.domain.errors import (
    AlreadyExistsError,
    Code,
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedModelError,
)
from edgeshard.domain.ids import Digest, ModelName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import FileInfo, ModelManifest
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.proto.v1.store_pb2_grpc import ModelStoreServiceStub
from edgeshard.rpc import hello
from edgeshard.storage.blobs import blob_sizes, manifest_items
from edgeshard.storage.checkpoint import blob_locations, build_manifest, open_checkpoint
from edgeshard.storage.locations import read_chunks
from edgeshard.wire.status import from_rpc_error
from edgeshard.wire.store import (
    manifest_from_json,
    manifest_from_wire,
    manifest_to_json,
    manifest_to_wire,
)

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
RunWire = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
LARGE = {"vocab": 32768, "hidden": 32, "layers": 1}
"""A checkpoint whose embedding and LM head have 4 MiB each."""


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def manifest_of(directory: Path, name: str = "tiny") -> ModelManifest:
    return build_manifest(name, open_checkpoint(directory))


async def put(
    stub: ModelStoreServiceStub,
    digest: str,
    size: int,
    offset: int,
    data: bytes,
    *,
    error: Code | None = None,
) -> None:
    async def messages() -> Any:
        yield pb.PutBlobRequest(header=pb.BlobHeader(sha256=digest, size=size, offset=offset))
        for start in range(0, len(data), 1 << 20):
            yield pb.PutBlobRequest(data=data[start : start + (1 << 20)])

    try:
        await stub.PutBlob(messages())
    except grpc.aio.AioRpcError as failure:
        assert from_rpc_error(failure).code == error, failure.details()
    else:
        assert error is None


async def test_adding_a_model_stores_every_blob_once(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server = await run_store()
    directory = make_checkpoint()
    channel = connect(server.address)
    steps: list[tuple[AddPhase, int, int]] = []
    digest = await add_model(channel, directory, "tiny", lambda *step: steps.append(step))

    manifest, stored = server.store.get("tiny")
    assert stored == digest == manifest.digest()
    assert manifest == manifest_of(directory)
    for blob, size in blob_sizes(manifest_items(manifest)).items():
        assert server.store.blobs.is_intact(blob, size)
    assert steps[-1] == (AddPhase.UPLOADING, manifest.stored_bytes, manifest.stored_bytes)
    assert {phase for phase, _, _ in steps} == {AddPhase.HASHING, AddPhase.UPLOADING}
    assert server.servicer.put_bytes == manifest.stored_bytes

    # Again, and under another name: nothing is sent.
    assert await add_model(channel, directory, "tiny") == digest
    assert await add_model(channel, directory, "twin") == digest
    assert server.servicer.put_bytes == manifest.stored_bytes
    assert [(model.name, of) for model, of in server.store.list()] == [
        ("tiny", digest),
        ("twin", digest),
    ]
    assert server.store.get(digest)[0].tensors == manifest.tensors


async def test_a_name_with_other_content_is_refused_and_changes_nothing(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    channel = connect(server.address)
    digest = await add_model(channel, make_checkpoint("one"), "tiny")
    before = files_under(tmp_path / "coordinator")
    with pytest.raises(AlreadyExistsError, match="delete") as caught:
        await add_model(channel, make_checkpoint("two", seed=1), "tiny")
    assert caught.value.field == "name"
    assert server.store.get("tiny")[1] == digest
    assert files_under(tmp_path / "coordinator") == before


async def test_a_name_that_is_not_valid_is_refused_before_the_model_is_opened(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_nothing(*_: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("edgeshard.client.uploads.opened", open_nothing)
    server = await run_store()
    with pytest.raises(InvalidArgumentError, match="not a valid name") as caught:
        await add_model(connect(server.address), make_checkpoint(), "Big-Q4")
    assert caught.value.field == "name"


async def test_an_upload_goes_on_where_the_connection_broke(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    run_wire: RunWire,
    connect: Connect,
    until: Until,
) -> None:
    server = await run_store()
    directory = make_checkpoint(**LARGE)
    wire, address = await run_wire(server.address, hold_up=7 << 20)
    adding = asyncio.ensure_future(add_model(connect(address), directory, "tiny"))
    # The wire holds back the rest of at least one of the two large blobs. Even if all data in
    # flight arrives, that blob is completed only if the upload continues.
    await until(lambda: sum(file.size >= 2 << 20 for file in server.store.blobs.files()) == 2)
    wire.break_now()
    await adding
    manifest, _ = server.store.get("tiny")
    assert any(offset >= 2 << 20 for offset in server.servicer.put_offsets)
    # Of the bytes that had arrived, at most the chunk being written was sent again.
    assert server.servicer.put_bytes <= manifest.stored_bytes + (2 << 20)


async def test_an_upload_goes_on_after_the_coordinator_restarted(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server = await run_store()
    directory = make_checkpoint(**LARGE)
    checkpoint = open_checkpoint(directory)
    manifest = build_manifest("tiny", checkpoint)
    largest = max(manifest.tensors, key=lambda tensor: tensor.stored_bytes)
    data = b"".join(
        read_chunks(blob_locations(checkpoint, manifest)[largest.sha256], "blob", 1 << 20)
    )
    stub = ModelStoreServiceStub(connect(server.address))
    await stub.RegisterModel(pb.RegisterModelRequest(manifest=manifest_to_wire(manifest)))
    await put(stub, largest.sha256, len(data), 0, data[: 2 << 20], error=Code.ABORTED)
    await server.stop()

    again = await run_store()
    await add_model(connect(again.address), directory, "tiny")
    assert 2 << 20 in again.servicer.put_offsets
    assert again.servicer.put_bytes == manifest.stored_bytes - (2 << 20)


async def test_two_clients_adding_one_model_do_not_harm_each_other(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server = await run_store()
    directory = make_checkpoint(**LARGE)
    digests = await asyncio.gather(
        *(add_model(connect(server.address), directory, name) for name in ("a", "b", "c"))
    )
    assert len(set(digests)) == 1
    manifest, _ = server.store.get("a")
    for blob, size in blob_sizes(manifest_items(manifest)).items():
        assert server.store.blobs.is_intact(blob, size)


async def test_uploads_of_one_blob_exclude_each_other(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, until: Until
) -> None:
    server = await run_store()
    manifest = manifest_of(make_checkpoint())
    tensor = manifest.tensors[0]
    stub = ModelStoreServiceStub(connect(server.address))
    await stub.RegisterModel(pb.RegisterModelRequest(manifest=manifest_to_wire(manifest)))
    header = pb.BlobHeader(sha256=tensor.sha256, size=tensor.stored_bytes)
    first = stub.PutBlob()
    await first.write(pb.PutBlobRequest(header=header, data=b"1234"))
    await until(lambda: server.store.blobs.received(tensor.sha256) == 4)
    await put(stub, tensor.sha256, tensor.stored_bytes, 0, b"", error=Code.ABORTED)
    assert server.store.blobs.received(tensor.sha256) == 4
    first.cancel()


async def test_only_expected_bytes_are_accepted(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    manifest = manifest_of(make_checkpoint())
    tensor = manifest.tensors[0]
    size = tensor.stored_bytes
    stub = ModelStoreServiceStub(connect(server.address))
    stranger = hashlib.sha256(b"stranger").hexdigest()
    await put(stub, stranger, 8, 0, b"stranger", error=Code.FAILED_PRECONDITION)
    await put(stub, "../../../etc/passwd", 8, 0, b"stranger", error=Code.INVALID_ARGUMENT)
    await put(stub, "A" * 64, 8, 0, b"stranger", error=Code.INVALID_ARGUMENT)
    assert files_under(tmp_path / "coordinator") == set()

    response = await stub.RegisterModel(
        pb.RegisterModelRequest(manifest=manifest_to_wire(manifest))
    )
    assert not response.registered and len(response.missing) == len(
        blob_sizes(manifest_items(manifest))
    )
    await put(stub, tensor.sha256, size + 1, 0, b"", error=Code.INVALID_ARGUMENT)
    await put(stub, tensor.sha256, size, 4, b"", error=Code.ABORTED)
    await put(stub, tensor.sha256, size, 0, bytes(size + 1), error=Code.INVALID_ARGUMENT)
    await put(stub, tensor.sha256, size, 0, bytes(size), error=Code.DATA_LOSS)
    assert server.store.blobs.size(tensor.sha256) is None
    assert server.store.blobs.received(tensor.sha256) == 0
    with pytest.raises(NotFoundError):
        server.store.get("tiny")
    with pytest.raises(grpc.aio.AioRpcError, match="header"):
        await stub.PutBlob(iter([pb.PutBlobRequest(data=b"1")]))


async def test_an_upload_that_says_nothing_ends(
    run_store: RunStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hello, "HELLO_TIMEOUT_S", 0.05)
    server = await run_store()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await ModelStoreServiceStub(connect(server.address)).PutBlob(timeout=60)
    error = from_rpc_error(ended.value)
    assert (error.field, error.reason) == ("header", "NO_HELLO")


@pytest.mark.parametrize(
    "path", ["../names.json", "..", "/etc/passwd", "a" * 63, "a" * 64 + "/", "", "A" * 64]
)
async def test_a_read_takes_digests_only(run_store: RunStore, connect: Connect, path: str) -> None:
    server = await run_store()
    stub = ModelStoreServiceStub(connect(server.address))
    call = stub.ReadBlob(pb.ReadBlobRequest(sha256=path))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(from_rpc_error(caught.value), InvalidArgumentError)


async def test_ranges_of_a_blob(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server = await run_store()
    directory = make_checkpoint(**LARGE)
    channel = connect(server.address)
    await add_model(channel, directory, "tiny")
    stub = ModelStoreServiceStub(channel)
    tensor = max(server.store.get("tiny")[0].tensors, key=lambda tensor: tensor.stored_bytes)
    data, size = server.store.blobs.path(tensor.sha256).read_bytes(), tensor.stored_bytes

    async def read(offset: int, length: int) -> bytes:
        request = pb.ReadBlobRequest(sha256=tensor.sha256, offset=offset, length=length)
        return b"".join([message.data async for message in stub.ReadBlob(request)])

    assert await read(0, 0) == data
    assert await read(5, 0) == data[5:]
    assert await read(5, (1 << 20) + 7) == data[5 : 5 + (1 << 20) + 7]
    assert await read(size, 0) == b""
    for offset, length in ((size + 1, 0), (1, size), (2**64 - 1, 2**64 - 1)):
        with pytest.raises(grpc.aio.AioRpcError, match="range"):
            await read(offset, length)


async def test_models_survive_a_restart_and_a_deleted_one_gives_its_bytes_back(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    channel = connect(server.address)
    one = await add_model(channel, make_checkpoint("one"), "one")
    await add_model(channel, make_checkpoint("one-again"), "alias")
    two = await add_model(channel, make_checkpoint("two", seed=2), "two")
    await server.stop()

    again = await run_store()
    assert [(m.name, digest) for m, digest in again.store.list()] == [
        ("alias", one),
        ("one", one),
        ("two", two),
    ]
    shared = (
        blob_sizes(again.store.get("one")[0].files).keys()
        & blob_sizes(again.store.get("two")[0].files).keys()
    )
    assert shared

    with pytest.raises(NotFoundError):
        again.store.delete("three")
    again.store.delete("one")
    assert again.store.get("alias")[1] == one
    again.store.delete("alias")
    with pytest.raises(NotFoundError):
        again.store.get(one)
    left = {file.digest for file in again.store.blobs.files()}
    assert left == blob_sizes(manifest_items(again.store.get("two")[0])).keys()
    again.store.delete("two")
    assert files_under(tmp_path / "coordinator") == {"names.json"}


async def test_damage_on_the_coordinators_disk_is_found_and_cured_by_adding_again(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server = await run_store()
    directory = make_checkpoint()
    channel = connect(server.address)
    digest = await add_model(channel, directory, "tiny")
    first, second, *_ = server.store.get("tiny")[0].tensors
    path = server.store.blobs.path(first.sha256)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    call = ModelStoreServiceStub(channel).ReadBlob(pb.ReadBlobRequest(sha256=first.sha256))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, DataLossError) and "add its model again" in error.message
    server.store.blobs.path(second.sha256).write_bytes(b"cut")

    assert await add_model(channel, directory, "tiny") == digest
    for tensor in (first, second):
        assert server.store.blobs.is_intact(tensor.sha256, tensor.stored_bytes)


async def test_a_damaged_manifest_is_reported_and_cured_by_adding_again(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    directory = make_checkpoint()
    digest = await add_model(connect(server.address), directory, "tiny")
    await server.stop()
    path = tmp_path / "coordinator" / "manifests" / f"{digest}.json"
    path.write_text(path.read_text().replace("model.norm", "model.morn"))

    again = await run_store()
    assert again.store.list() == ()
    with pytest.raises(DataLossError, match="add the model again"):
        again.store.get("tiny")
    assert await add_model(connect(again.address), directory, "tiny") == digest
    assert again.store.get("tiny")[1] == digest
    assert again.servicer.put_bytes == 0


def wrong_manifests(good: ModelManifest) -> dict[str, tuple[pb.Manifest, str]]:
    """Manifests with one fault each, by the fault, with the field that the error must name."""

    def change(**changes: Any) -> pb.Manifest:
        message = manifest_to_wire(good)
        for key, value in changes.items():
            setattr(message, key, value)
        return message

    def change_tensor(**changes: Any) -> pb.Manifest:
        message = manifest_to_wire(good)
        for key, value in changes.items():
            setattr(message.tensors[0], key, value)
        return message

    name = good.tensors[0].name
    twice = manifest_to_wire(good)
    reshaped = manifest_to_wire(good)
    unnamed = manifest_to_wire(good)
    twice.tensors.append(twice.tensors[0])
    reshaped.tensors[0].shape.append(1)
    unnamed.files[0].name = "../tokenizer.json"
    sized = manifest_to_wire(good)
    sized.tensors[1].sha256 = next(
        t.sha256
        for t in good.tensors
        if t.stored_bytes != good.tensors[1].stored_bytes and t != good.tensors[1]
    )
    missing = manifest_to_wire(replace(good, tensors=good.tensors[1:]))
    large, settings = manifest_to_wire(good), manifest_to_wire(good)
    next(f for f in large.files if f.name == "tokenizer.json").size = (64 << 20) + 1
    next(f for f in settings.files if f.name == "generation_config.json").size = (1 << 20) + 1
    many = good.config_json.replace('"num_hidden_layers": 2', '"num_hidden_layers": 2000000000')
    return {
        "a path as name": (change(name="../tiny"), "name"),
        "no config": (change(config_json=""), "config_json"),
        "deep config": (change(config_json="[" * 100_000), "config_json"),
        "other architecture": (change(architecture="gpt2"), "architecture"),
        "unsupported": (change(config_json='{"model_type": "t5"}'), "model_type"),
        "a config of too many layers": (change(config_json=many), "num_hidden_layers"),
        "a path as digest": (change_tensor(sha256="../" * 21 + "a"), name),
        "no dtype": (change_tensor(dtype=0), name),
        "a nameless tensor": (change_tensor(name=""), "tensors"),
        "an unknown tensor": (change_tensor(name="model.layers.9.input_layernorm.weight"), ""),
        "a tensor twice": (twice, name),
        "another shape": (reshaped, name),
        "a missing tensor": (missing, name),
        "a path as file": (unnamed, "files"),
        "two sizes of one blob": (sized, ""),
        "a large tokenizer": (large, "tokenizer.json"),
        "a large generation config": (settings, "generation_config.json"),
        "nothing": (pb.Manifest(), "name"),
    }


async def test_a_wrong_manifest_is_refused_by_field_and_changes_nothing(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    stub = ModelStoreServiceStub(connect(server.address))
    for what, (message, field) in wrong_manifests(manifest_of(make_checkpoint())).items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RegisterModel(pb.RegisterModelRequest(manifest=message))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgumentError | UnsupportedModelError | DataLossError), (
            what,
            error,
        )
        assert error.field == field if field else error.field, (what, error)
        assert (
            server.store.expected_size(
                Digest(message.tensors[0].sha256) if message.tensors else Digest("")
            )
            is None
        )
    assert files_under(tmp_path / "coordinator") == set()
    assert server.store.list() == ()


def test_a_manifest_survives_the_wire_and_the_disk(make_checkpoint: MakeCheckpoint) -> None:
    manifest = manifest_of(make_checkpoint())
    assert manifest_from_wire(manifest_to_wire(manifest)) == manifest
    text = manifest_to_json(manifest)
    assert manifest_from_json(text, manifest.digest()) == manifest
    half = replace(
        manifest, tensors=tuple(replace(t, dtype=DType.BFLOAT16) for t in manifest.tensors)
    )
    assert manifest_from_wire(manifest_to_wire(half)) == half
    for damaged in (
        text[:-5],
        "",
        "[]",
        text.replace("lm_head", "lm_tail"),
        manifest_to_json(half),
    ):
        with pytest.raises(DataLossError):
            manifest_from_json(damaged, manifest.digest())
    for name in (
        "a/tokenizer.json",
        "/tokenizer.json",
        "a..json",
        ".json",
        "",
        "a\\b.json",
        "x" * 129,
    ):
        named = FileInfo(name, 1, manifest.files[0].sha256)
        with pytest.raises(InvalidArgumentError, match="plain file name"):
            manifest_from_wire(manifest_to_wire(replace(manifest, files=(named,))))
    huge = FileInfo("tokenizer.json", 2**63, manifest.files[0].sha256)
    with pytest.raises(InvalidArgumentError, match="at most"):
        manifest_from_wire(manifest_to_wire(replace(manifest, files=(huge,))))


async def test_errors_of_the_local_directory_need_no_coordinator(
    make_checkpoint: MakeCheckpoint, connect: Connect, tmp_path: Path
) -> None:
    channel = connect("127.0.0.1:9")
    with pytest.raises(NotFoundError):
        await add_model(channel, tmp_path / "nowhere", "tiny")
    with pytest.raises(InvalidArgumentError) as caught:
        await add_model(channel, make_checkpoint("good"), "../tiny")
    assert caught.value.field == "name"
    with pytest.raises(UnavailableError):
        await add_model(channel, tmp_path / "good")


async def test_the_default_name_is_the_directorys(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server = await run_store()
    await add_model(connect(server.address), make_checkpoint("Tiny Llama (v2)"))
    assert server.store.get(ModelName("tiny-llama-v2"))


def test_names_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    from edgeshard_coordinator.store import ModelStore

    (tmp_path / "names.json").write_text('{"../a": "b"}')
    with pytest.raises(EdgeShardError, match=r"names\.json"):
        ModelStore(tmp_path).open()
