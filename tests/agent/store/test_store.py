"""The agent's cache and fetcher with a real store: the fetched blobs, the number of fetches, and
broken connections."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.store.blob_cache import BlobCache
from edgeshard_agent.store.fetcher import Fetcher, Retries
from safetensors.numpy import load_file

from edgeshard.architectures import stage_tensors
from edgeshard.client.uploads import add_model
from edgeshard.domain.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import FileInfo, LayerRange, ModelManifest, TensorInfo
from edgeshard.storage.blobs import blob_sizes, in_thread
from edgeshard.storage.locations import BlobLocation
from tests.support.sizes import parameter_bytes

pytestmark = pytest.mark.timing

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
RunWire = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]
LARGE = {"vocab": 32768, "hidden": 64, "layers": 1}
"""A checkpoint whose embedding and LM head have 8 MiB each, more than the transport buffers of a
cut."""
QUICK = Retries(attempts=3, first_wait_s=0.01, longest_wait_s=0.05)


@pytest.fixture
async def cache(tmp_path: Path) -> BlobCache:
    return await open_cache(tmp_path)


async def open_cache(tmp_path: Path, limit_bytes: int = 1 << 30) -> BlobCache:
    cache = BlobCache(tmp_path / "agent", limit_bytes)
    await cache.start()
    return cache


@dataclass(frozen=True)
class Stored:
    """A store that has a small model, and a fetcher that reads it into the test's cache."""

    server: Any
    channel: grpc.aio.Channel
    fetcher: Fetcher
    manifest: ModelManifest

    @property
    def tensor(self) -> TensorInfo:
        return embedding(self.manifest)


@pytest.fixture
async def stored(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, cache: BlobCache
) -> Stored:
    server = await run_store()
    channel = connect(server.address)
    fetcher = Fetcher(cache, channel)
    return Stored(
        server,
        channel,
        fetcher,
        await fetcher.manifest(await add_model(channel, make_checkpoint(), "tiny")),
    )


def whole(source: CachedTensorSource, name: str) -> torch.Tensor:
    value = source.read(name)
    assert isinstance(value, torch.Tensor)
    return value


def embedding(manifest: ModelManifest) -> TensorInfo:
    return next(tensor for tensor in manifest.tensors if "embed_tokens" in tensor.name)


async def test_a_node_with_4_of_12_layers_fetches_only_their_tensors(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, cache: BlobCache
) -> None:
    server = await run_store()
    directory = make_checkpoint(layers=12)
    digest = await add_model(connect(server.address), directory, "tiny")
    fetcher = Fetcher(cache, connect(server.address))
    manifest = await fetcher.manifest(digest)
    tensors = stage_tensors(manifest, LayerRange(4, 8))
    steps: list[tuple[int, int]] = []
    pin = await fetcher.fetch(tensors, lambda done, total: steps.append((done, total)))

    expected = {
        t.name: t
        for t in manifest.tensors
        if t.name.startswith(tuple(f"model.layers.{n}." for n in range(4, 8)))
    }
    assert {t.name for t in tensors} == expected.keys() and len(expected) == 4 * 9
    assert sorted(server.servicer.reads) == sorted((t.sha256, 0) for t in expected.values())
    stored = sum(t.stored_bytes for t in expected.values())
    assert sum(server.servicer.served.values()) == cache.used_bytes == stored
    assert stored == parameter_bytes(tensors, DType.FLOAT32)
    assert steps[-1] == (stored, stored)

    source = CachedTensorSource(pin.location, tensors)
    assert set(source.names()) == expected.keys()
    original = load_file(directory / "model.safetensors")
    for name in source.names():
        assert torch.equal(whole(source, name), torch.from_numpy(original[name]))


async def test_what_the_disk_has_no_room_for_is_refused_before_a_byte_is_fetched(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    cache: BlobCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await run_store()
    digest = await add_model(connect(server.address), make_checkpoint(layers=2), "tiny")
    fetcher = Fetcher(cache, connect(server.address))
    tensors = stage_tensors(await fetcher.manifest(digest), LayerRange(0, 2))
    needed = sum(tensor.stored_bytes for tensor in tensors)
    monkeypatch.setattr("edgeshard_agent.store.blob_cache.free_bytes", lambda path: needed - 1)
    with pytest.raises(
        ResourceExhaustedError, match=f"needs {needed} bytes on the disk of {cache.directory}"
    ) as full:
        await fetcher.fetch(tensors)
    assert full.value.reason == "DISK_FULL" and server.servicer.reads == []
    (first, *_) = tensors
    (await fetcher.fetch([first])).release()
    with await fetcher.fetch(tensors):  # cached blobs take no more space
        assert cache.used_bytes == needed


async def test_a_cache_hit_needs_no_network(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    cache: BlobCache,
    tmp_path: Path,
) -> None:
    server = await run_store()
    channel = connect(server.address)
    digest = await add_model(channel, make_checkpoint(), "tiny")
    first = Fetcher(cache, channel)
    manifest = await first.manifest(digest)
    (await first.fetch((*manifest.tensors, *manifest.files))).release()
    await server.stop()

    for kept in (cache, await open_cache(tmp_path)):
        fetcher = Fetcher(kept, channel, retries=QUICK)
        assert await fetcher.manifest(digest) == manifest
        pin = await fetcher.fetch((*manifest.tensors, *manifest.files))
        assert (
            pin.location(manifest.files[0].sha256).path.read_bytes()
            == b'{"seed": 0, "model": {"vocab": {}}}'
        )
        pin.release()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
async def test_a_damaged_cached_file_is_fetched_again(
    stored: Stored, cache: BlobCache, damage: str
) -> None:
    server = stored.server
    fetcher = stored.fetcher
    manifest = stored.manifest
    (await fetcher.fetch(manifest.tensors)).release()
    used = cache.used_bytes
    victim = manifest.tensors[3]
    path = own_file(cache, victim.sha256)
    data = path.read_bytes()
    path.write_bytes(
        {"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "empty": b""}[damage]
    )
    server.servicer.reads.clear()

    with await fetcher.fetch(manifest.tensors):
        assert server.servicer.reads == [(victim.sha256, 0)]
        assert path.read_bytes() == data
        assert cache.used_bytes == used


async def test_a_download_goes_on_where_the_connection_broke(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    run_wire: RunWire,
    connect: Connect,
    cache: BlobCache,
) -> None:
    server = await run_store()
    digest = await add_model(connect(server.address), make_checkpoint(**LARGE), "tiny")
    wire, address = await run_wire(server.address, hold_down=5 << 20)
    fetcher = Fetcher(cache, connect(address))
    tensor = embedding(await fetcher.manifest(digest))

    def progress(done: int, total: int) -> None:
        if done >= 2 << 20:
            wire.break_now()

    with await fetcher.fetch([tensor], progress):
        assert await cache.is_intact(tensor.sha256, tensor.stored_bytes)
    (_, start), *resumed = server.servicer.reads
    assert start == 0 and resumed
    # The data that had arrived, 2 MiB at least, was not requested again.
    assert all(2 << 20 <= offset < tensor.stored_bytes for _, offset in resumed)
    again = server.servicer.served[tensor.sha256] - tensor.stored_bytes
    assert again <= tensor.stored_bytes - (2 << 20)


async def test_a_download_goes_on_after_the_agent_restarted(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    cache: BlobCache,
    tmp_path: Path,
) -> None:
    server = await run_store()
    channel = connect(server.address)
    digest = await add_model(channel, make_checkpoint(**LARGE), "tiny")
    fetcher = Fetcher(cache, channel)
    tensor = embedding(await fetcher.manifest(digest))
    some = asyncio.Event()

    def progress(done: int, total: int) -> None:
        if done >= 2 << 20:
            some.set()

    task = asyncio.ensure_future(fetcher.fetch([tensor], progress))
    await asyncio.wait_for(some.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = await in_thread(cache.blobs.received, tensor.sha256)
    assert 2 << 20 <= kept < tensor.stored_bytes
    assert cache.used_bytes == kept

    restarted = await open_cache(tmp_path)
    assert restarted.used_bytes == kept
    server.servicer.reads.clear()
    with await Fetcher(restarted, channel).fetch([tensor]):
        assert server.servicer.reads == [(tensor.sha256, kept)]
        assert await restarted.is_intact(tensor.sha256, tensor.stored_bytes)


async def test_a_wrong_partial_file_is_noticed_and_fetched_from_the_beginning(
    stored: Stored, cache: BlobCache
) -> None:
    server = stored.server
    fetcher = stored.fetcher
    tensor = stored.tensor
    await in_thread(cache.blobs.truncate, tensor.sha256, 0)
    await in_thread(cache.blobs.write, tensor.sha256, 0, b"wrong")
    with await fetcher.fetch([tensor]):
        assert server.servicer.reads == [(tensor.sha256, 5), (tensor.sha256, 0)]
    await cache.discard(tensor.sha256)
    await in_thread(cache.blobs.truncate, tensor.sha256, 0)
    await in_thread(cache.blobs.write, tensor.sha256, 0, bytes(tensor.stored_bytes + 1))
    with await fetcher.fetch([tensor]):
        assert await cache.is_intact(tensor.sha256, tensor.stored_bytes)


async def test_damaged_downloads_are_repeated_a_bounded_number_of_times(
    stored: Stored, cache: BlobCache
) -> None:
    server = stored.server
    fetcher = stored.fetcher
    tensor = stored.tensor
    server.servicer.damage_reads = 2
    (await fetcher.fetch([tensor])).release()
    assert len(server.servicer.reads) == 3

    await cache.discard(tensor.sha256)
    server.servicer.damage_reads = 100
    server.servicer.reads.clear()
    with pytest.raises(DataLossError, match=r"embed_tokens") as caught:
        await fetcher.fetch([tensor])
    assert caught.value.field == tensor.name
    assert len(server.servicer.reads) == 3
    assert cache.used_bytes == 0 and list(own_file(cache, tensor.sha256).parent.iterdir()) == []


async def test_damage_at_the_coordinator_is_said_at_once(stored: Stored) -> None:
    server = stored.server
    fetcher = stored.fetcher
    tensor = stored.tensor
    server.store.blobs.path(tensor.sha256).write_bytes(bytes(tensor.stored_bytes))
    with pytest.raises(DataLossError, match="add its model again"):
        await fetcher.fetch([tensor])
    assert len(server.servicer.reads) == 1
    with pytest.raises(NotFoundError, match="add its model again"):
        await fetcher.fetch([tensor])


async def test_an_unreachable_store_is_given_up_after_the_attempts(
    connect: Connect, cache: BlobCache
) -> None:
    fetcher = Fetcher(cache, connect("127.0.0.1:9"), retries=QUICK)
    with pytest.raises(UnavailableError):
        await fetcher.manifest(Digest("a" * 64))
    with pytest.raises(UnavailableError):
        await fetcher.fetch([FileInfo("tokenizer.json", 5, Digest("a" * 64))])
    assert cache.used_bytes == 0


async def test_a_silent_store_counts_as_broken(stored: Stored, cache: BlobCache) -> None:
    server = stored.server
    patient = stored.fetcher
    tensor = stored.tensor
    server.servicer.silent = True
    with pytest.raises(UnavailableError, match="sent nothing"):
        await Fetcher(cache, stored.channel, retries=Retries(attempts=1, stall_s=0.3)).fetch(
            [tensor]
        )
    server.servicer.silent = False
    (await patient.fetch([tensor])).release()


async def test_a_manifest_is_the_one_asked_for(
    make_checkpoint: MakeCheckpoint,
    run_store: RunStore,
    connect: Connect,
    cache: BlobCache,
    tmp_path: Path,
) -> None:
    server = await run_store()
    channel = connect(server.address)
    digest = await add_model(channel, make_checkpoint(), "tiny")
    fetcher = Fetcher(cache, channel, retries=QUICK)
    with pytest.raises(NotFoundError):
        await fetcher.manifest(Digest("0" * 64))
    with pytest.raises(InvalidArgumentError):
        await fetcher.manifest(Digest("../names"))

    manifest = await fetcher.manifest(digest)
    assert await fetcher.manifest(digest) == manifest
    calls = server.servicer.manifest_calls
    path = tmp_path / "agent" / "manifests" / f"{digest}.json"
    path.write_text(path.read_text().replace("lm_head", "lm_tail"))
    assert await fetcher.manifest(digest) == manifest
    assert server.servicer.manifest_calls == calls + 1

    other = await add_model(channel, make_checkpoint("other", seed=1), "other")
    real_get = server.store.get
    server.store.get = lambda name: real_get("tiny" if name == other else name)
    with pytest.raises(DataLossError, match="another manifest"):
        await fetcher.manifest(other)


def blob(name: str, server: Any) -> FileInfo:
    """A blob of 100 bytes that the store holds, whatever model it belongs to."""
    data = name.encode().ljust(100, b".")
    digest = Digest(hashlib.sha256(data).hexdigest())
    server.store.blobs.truncate(digest, 0)
    server.store.blobs.write(digest, 0, data)
    server.store.blobs.commit(digest, 100)
    return FileInfo(name, 100, digest)


async def test_the_least_recently_used_unpinned_blobs_make_room(
    run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    cache = await open_cache(tmp_path, 350)
    fetcher = Fetcher(cache, connect(server.address), parallel=1)
    a, b, c, d, e = (blob(name, server) for name in "abcde")

    def present() -> set[str]:
        return {item.name for item in (a, b, c, d, e) if own_file(cache, item.sha256).exists()}

    pin_a = await fetcher.fetch([a])
    (await fetcher.fetch([b, c])).release()
    (await fetcher.fetch([b])).release()
    # c is the least recently used unpinned blob; a is older but pinned.
    (await fetcher.fetch([d])).release()
    assert present() == {"a", "b", "d"} and cache.used_bytes == 300

    # After a restart with a lower limit the order of use is still known.
    pin_a.release()
    for age, item in enumerate((a, b, d)):
        os.utime(own_file(cache, item.sha256), (age, age))
    (await fetcher.fetch([a])).release()
    cache = await open_cache(tmp_path, 250)
    assert present() == {"a", "d"} and cache.used_bytes == 200

    # Pinned blobs stay, even if the new blob then has no space; the failed one leaves nothing over.
    fetcher = Fetcher(cache, connect(server.address))
    with await fetcher.fetch([a, d]):
        with pytest.raises(ResourceExhaustedError, match="cache-limit") as caught:
            await fetcher.fetch([e])
        assert caught.value.field == "cache-limit"
        assert present() == {"a", "d"} and cache.used_bytes == 200
    (await fetcher.fetch([e])).release()
    assert present() == {"d", "e"} or present() == {"a", "e"}


async def test_a_blob_that_another_load_drops_makes_room_only_once(
    run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    cache = await open_cache(tmp_path, 250)
    fetcher = Fetcher(cache, connect(server.address))
    a, b = blob("a", server), blob("b", server)
    for item in (a, b):
        (await fetcher.fetch([item])).release()
    # The drop of a holds its lock when the other load chooses a as its victim.
    await asyncio.gather(cache.drop_unused([a.sha256]), cache.make_room_for_packed(150))
    assert cache.used_bytes == 100 and own_file(cache, b.sha256).exists()


async def test_a_pin_counts_its_holders(
    run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    cache = await open_cache(tmp_path, 100)
    fetcher = Fetcher(cache, connect(server.address))
    a, b = blob("a", server), blob("b", server)
    first, second = await fetcher.fetch([a]), await fetcher.fetch([a])
    first.release()
    first.release()
    with pytest.raises(ResourceExhaustedError):
        await fetcher.fetch([b])
    second.release()
    (await fetcher.fetch([b])).release()
    assert not own_file(cache, a.sha256).exists()


async def test_what_can_never_fit_is_refused_before_a_byte_is_fetched(
    run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    server = await run_store()
    a, b = blob("a", server), blob("b", server)
    for limit, items, words in ((99, [a], "a has 100 bytes"), (150, [a, b], "the stage has 200")):
        fetcher = Fetcher(await open_cache(tmp_path, limit), connect(server.address))
        with pytest.raises(ResourceExhaustedError, match=words) as caught:
            await fetcher.fetch(items)
        assert caught.value.field == "cache-limit"
    assert server.servicer.reads == []


async def test_two_stages_fetch_a_shared_blob_once(
    run_store: RunStore, connect: Connect, cache: BlobCache
) -> None:
    server = await run_store()
    a = blob("a", server)
    same = FileInfo("the same under another name", 100, a.sha256)
    fetchers = [Fetcher(cache, connect(server.address)) for _ in range(3)]
    await asyncio.gather(*(fetcher.fetch([a, same]) for fetcher in fetchers))
    assert server.servicer.reads == [(a.sha256, 0)]
    assert blob_sizes([a, same]) == {a.sha256: 100} and cache.used_bytes == 100


async def test_strange_files_in_the_cache_are_passed_over_and_temporary_ones_removed(
    tmp_path: Path,
) -> None:
    blobs = tmp_path / "agent" / "blobs" / "sha256" / "aa"
    manifests = tmp_path / "agent" / "manifests"
    blobs.mkdir(parents=True)
    manifests.mkdir()
    (blobs / "README").write_text("hello")
    (blobs / ("b" * 64)).write_text("in the wrong folder")
    (manifests / "x.json.tmp").write_text("{")
    cache = await open_cache(tmp_path, 1)
    assert cache.used_bytes == 0
    assert not list(manifests.iterdir())
    assert {path.name for path in blobs.iterdir()} == {"README", "b" * 64}
    with pytest.raises(InvalidArgumentError):
        own_file(cache, Digest("../../x"))


def located(path: Path) -> BlobLocation:
    return BlobLocation(path, 0, path.stat().st_size)


def own_file(cache: BlobCache, digest: Digest) -> Path:
    return cache.blobs.path(digest)


def write_tensor(
    directory: Path, name: str, dtype: DType, shape: tuple[int, ...], data: bytes
) -> TensorInfo:
    digest = Digest(hashlib.sha256(data).hexdigest())
    (directory / digest).write_bytes(data)
    return TensorInfo(name, dtype, shape, digest)


def test_tensors_are_mapped_from_their_files_and_never_change_them(tmp_path: Path) -> None:
    half = np.arange(6, dtype=np.float16).reshape(2, 3)
    tensors = [
        write_tensor(tmp_path, "half", DType.FLOAT16, (2, 3), half.tobytes()),
        write_tensor(tmp_path, "brain", DType.BFLOAT16, (3,), b"\x80\x3f\x00\x40\x40\x40"),
        write_tensor(tmp_path, "scalar", DType.FLOAT32, (), np.float32(7).tobytes()),
        write_tensor(tmp_path, "none", DType.FLOAT32, (0, 4), b""),
    ]
    source = CachedTensorSource(lambda digest: located(tmp_path / digest), tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = {name: whole(source, name) for name in source.names()}
    assert torch.equal(read["half"], torch.from_numpy(half.copy()))
    assert torch.equal(read["brain"], torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    assert read["scalar"].item() == 7 and read["scalar"].shape == ()
    assert read["none"].shape == (0, 4)
    path = tmp_path / tensors[0].sha256
    assert str(path) in Path("/proc/self/maps").read_text()
    read["half"].add_(1)
    assert path.read_bytes() == half.tobytes()

    path.write_bytes(half.tobytes()[:-2])
    with pytest.raises(DataLossError, match="half"):
        source.read("half")
    path.unlink()
    with pytest.raises(DataLossError, match="half"):
        source.read("half")
    with pytest.raises(DataLossError, match="other"):
        source.read("other")


@pytest.mark.parametrize("times", [1, 2])
async def test_what_is_removed_or_fetched_while_it_is_called_off_is_counted_as_it_is(
    cache: BlobCache, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Also after several cancellations: the thread continues."""
    gone, fetched = (Digest(hashlib.sha256(name).hexdigest()) for name in (b"gone", b"fetched"))
    reached, go_on = threading.Event(), threading.Event()
    for digest in (gone, fetched):
        await cache.reserve(digest, 100)
        await in_thread(cache.blobs.truncate, digest, 0)
        await in_thread(cache.blobs.write, digest, 0, bytes(60))

    def slowly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            reached.set()
            assert go_on.wait(30)
            return real(*arguments)

        return call

    monkeypatch.setattr(cache.blobs, "remove", slowly(cache.blobs.remove))
    monkeypatch.setattr(cache.blobs, "size", slowly(cache.blobs.size))
    for work, left in ((cache.discard(gone), 100), (cache.settle(fetched), 60)):
        reached.clear()
        go_on.clear()
        task = asyncio.ensure_future(work)
        await asyncio.to_thread(reached.wait, 30)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cache.used_bytes == left


async def test_two_loads_may_keep_a_manifest_at_once(stored: Stored, tmp_path: Path) -> None:
    cache = await open_cache(tmp_path / "another")
    digest = stored.manifest.digest()
    await asyncio.gather(*(cache.keep_manifest(digest, stored.manifest) for _ in range(20)))
    assert await cache.manifest(digest) == stored.manifest


async def test_a_fetch_that_fails_and_is_called_off_while_it_ends_holds_nothing(
    run_store: RunStore, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await run_store()
    cache = await open_cache(tmp_path, 250)
    fetcher = Fetcher(cache, connect(server.address))
    held, one, other = (blob(name, server) for name in ("held", "one", "other"))
    ending, settle = asyncio.Event(), cache.settle

    async def settled(digest: Digest) -> None:
        if digest in (one.sha256, other.sha256):
            ending.set()
            await asyncio.Event().wait()
        await settle(digest)

    with await fetcher.fetch([held]):
        server.servicer.silent = True
        monkeypatch.setattr(cache, "settle", settled)
        task = asyncio.ensure_future(fetcher.fetch([one, other]))
        await asyncio.wait_for(ending.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(cache._pins) == [held.sha256]
    assert not cache._pins
