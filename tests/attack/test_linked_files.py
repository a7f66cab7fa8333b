"""What was added stays what it was, or is refused, whoever writes into the files that it came from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from edgeshard_agent.model.weights.cached_source import CachedTensorSource
from edgeshard_agent.store.cache import BlobCache
from edgeshard_agent.store.fetcher import Fetcher
from edgeshard_coordinator.store import ModelStore

from edgeshard.client.models import add_model
from edgeshard.domain.errors import DataLossError
from edgeshard.storage.blobs import BlobDirectory, manifest_items
from edgeshard.storage.checkpoint import build_manifest, item_locations, open_checkpoint
from tests.attack import linked_files

MakeCheckpoint = Callable[..., Path]
RunStore = Callable[..., Awaitable[Any]]
Connect = Callable[[str], grpc.aio.Channel]
TEMPLATE = b"{% for m in messages %}{{ m.content }} safe{% endfor %}"


def whole(source: CachedTensorSource, name: str) -> torch.Tensor:
    value = source.read(name)
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
    """An agent that reads the coordinator's store in place looks at the bytes that it loads, not at earlier ones."""
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
    for item, at in zip(manifest_items(manifest), item_locations(checkpoint, manifest), strict=True):
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
            assert found is not None and not found.is_linked and models.blobs.is_intact(file.sha256, file.size)
