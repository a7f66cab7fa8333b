"""An added model stays unchanged or is refused, whatever is written into its original files."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import grpc
import pytest
import torch
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.ops.block_formats import BlockWeight
from edgeshard_agent.store.blob_cache import BlobCache
from edgeshard_agent.store.fetcher import Fetcher
from edgeshard_coordinator.store import ModelStore

from edgeshard.client.uploads import add_model
from edgeshard.domain.errors import DataLossError
from edgeshard.storage.blobs import BlobDirectory, manifest_items
from edgeshard.storage.checkpoint import build_manifest, item_locations, open_checkpoint
from edgeshard.storage.locations import CHANGED_SINCE_ADDED
from tests.attack import linked_files
from tests.support.gguf_files import everywhere, write_demo_gguf

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]
TEMPLATE = b"{% for m in messages %}{{ m.content }} safe{% endfor %}"


def whole(source: CachedTensorSource, name: str) -> torch.Tensor:
    value = source.read(name)
    if isinstance(value, BlockWeight):
        return value.data
    assert isinstance(value, torch.Tensor)
    return value


def checkpoint_with_template(make_checkpoint: MakeCheckpoint) -> Path:
    directory = make_checkpoint()
    (directory / "chat_template.jinja").write_bytes(TEMPLATE)
    return directory


async def test_a_template_stays_as_it_was_added(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect
) -> None:
    server, directory = await run_store(), checkpoint_with_template(make_checkpoint)
    await add_model(connect(server.address), directory, "tiny", here=True)
    manifest, _ = server.store.get("tiny")
    assert linked_files.edit(directory / "chat_template.jinja", b"safe", b"evil") == 1
    for file in manifest.files:
        assert server.store.blobs.is_intact(file.sha256, file.size), file.name
    digest = next(file.sha256 for file in manifest.files if file.name == "chat_template.jinja")
    assert server.store.file_path(digest).read_bytes() == TEMPLATE


async def test_a_weight_that_changes_after_it_was_fetched_is_refused(
    make_checkpoint: MakeCheckpoint, run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    """An agent that reads the coordinator's store in place looks at the bytes that it loads, not at
    earlier ones."""
    server, directory = await run_store(), make_checkpoint()
    channel = connect(server.address)
    await add_model(channel, directory, "tiny", here=True)
    manifest, _ = server.store.get("tiny")
    cache = BlobCache(tmp_path / "agent", 1 << 30, server.store.blobs)
    await cache.start()
    with await Fetcher(cache, channel).fetch((*manifest.tensors, *manifest.files)) as pin:
        assert not server.servicer.reads, "they are used in place"
        source = CachedTensorSource(pin.location, manifest.tensors)
        changed = manifest.tensors[0]
        as_added = {name: whole(source, name).clone() for name in source.names()}
        at = pin.location(changed.sha256)
        linked_files.flip(directory / "model.safetensors", at.offset + at.size - 1)
        with pytest.raises(DataLossError) as refused:
            source.read(changed.name)
        assert refused.value.reason == "CHANGED_SINCE_ADDED" and refused.value.field == changed.name
        for tensor in manifest.tensors[1:]:
            assert torch.equal(whole(source, tensor.name), as_added[tensor.name])
        for file in manifest.files:
            assert not pin.location(file.sha256).is_linked


def linked_as_before(store: Path, directory: Path) -> ModelStore:
    """A store in which an earlier version has linked the small files of a model, too."""
    checkpoint = open_checkpoint(directory)
    manifest = build_manifest("tiny", checkpoint)
    blobs = BlobDirectory(store / "blobs")
    blobs.create()
    for item, at in zip(
        manifest_items(manifest), item_locations(checkpoint, manifest), strict=True
    ):
        with at.path.open("rb") as file:
            whole = blobs.linked.take(at.path, file, lambda: 1 << 30)
        blobs.linked.keep({item.sha256: replace(whole, offset=at.offset, size=at.size)})
    models = ModelStore(store)
    models.register(manifest)
    return models


@pytest.mark.parametrize("edited", [False, True])
def test_small_files_that_are_linked_already_are_copied_if_they_are_as_added(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, edited: bool
) -> None:
    directory = checkpoint_with_template(make_checkpoint)
    models = linked_as_before(tmp_path / "store", directory)
    if edited:
        linked_files.edit(directory / "chat_template.jinja", b"safe", b"evil")
    models.open()
    if not edited:
        linked_files.edit(directory / "chat_template.jinja", b"safe", b"evil")
    manifest, _ = models.get("tiny")
    for file in manifest.files:
        found = models.blobs.locate(file.sha256)
        if file.name == "chat_template.jinja" and edited:
            assert found is None
        else:
            assert (
                found is not None
                and not found.is_linked
                and models.blobs.is_intact(file.sha256, file.size)
            )


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.usefixtures("no_links")
async def test_a_file_that_is_read_in_place_gives_its_numbers_or_its_name(
    run_store: RunStore, connect: Connect, tmp_path: Path
) -> None:
    """A GGUF of another owner is not copied, and nothing of it is served once it has changed."""
    server = await run_store()
    channel = connect(server.address)
    path = write_demo_gguf(tmp_path / "demo.gguf", everywhere(gguf.GGMLQuantizationType.Q4_K))
    await add_model(channel, path, "demo", here=True)
    manifest, _ = server.store.get("demo")
    tokenizer = sum(file.size for file in manifest.files)
    added = disk_bytes(tmp_path / "coordinator") - tokenizer
    assert added > 0
    assert added < 0.01 * path.stat().st_size, "the notes and the manifest"
    cache = BlobCache(tmp_path / "far", 1 << 30)
    await cache.start()
    fetcher = Fetcher(cache, channel)
    with await fetcher.fetch(manifest.tensors) as pin:
        assert server.servicer.reads, "an agent elsewhere fetches them"
        fetched = CachedTensorSource(pin.location, manifest.tensors)
        here = CachedTensorSource(server.store.blobs.locate, manifest.tensors)
        for tensor in manifest.tensors:
            assert torch.equal(whole(fetched, tensor.name), whole(here, tensor.name)), tensor.name
    status, last = path.stat(), manifest.tensors[-1]
    at = server.store.blobs.locate(last.sha256)
    assert at is not None
    linked_files.flip(path, at.offset)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    nowhere = BlobCache(tmp_path / "new", 1 << 30)
    await nowhere.start()
    for _ in range(2):  # the first by the bytes, the second by the note
        with pytest.raises(DataLossError, match=str(path)) as refused:
            await Fetcher(nowhere, channel).fetch([last])
        assert refused.value.reason == CHANGED_SINCE_ADDED
    with pytest.raises(DataLossError, match=str(path)):
        await Fetcher(nowhere, channel).fetch([manifest.tensors[0]])
    linked_files.flip(path, at.offset)
    await add_model(channel, path, "demo", here=True)
    with await Fetcher(nowhere, channel).fetch(manifest.tensors):
        pass
