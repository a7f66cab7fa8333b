"""The files of a directory that belong to a model: links, pipes, caches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, NotFoundError
from edgeshard.storage import checkpoint
from edgeshard.storage.checkpoint import blob_locations, build_manifest, open_checkpoint
from edgeshard.storage.locations import read_chunks
from edgeshard.storage.model_directory import open_regular

MakeCheckpoint = Callable[..., Path]
FILES = ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors")
CANARY = '{"canary": "what must not leave this machine", "model": {"vocab": {}}}'


def refused(directory: Path, name: str, reason: str) -> EdgeShardError:
    with pytest.raises(EdgeShardError) as caught:
        build_manifest("tiny", open_checkpoint(directory))
    assert (
        caught.value.field == name
        and name in caught.value.message
        and caught.value.reason == reason
    )
    assert "canary" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["absolute", "relative", "over a link", "through a directory"])
def test_a_link_out_of_the_model_is_refused_whatever_it_leads_to(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, way: str
) -> None:
    """The file has the right form: only its place is wrong."""
    directory = make_checkpoint()
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.move(directory / name, outside / "canary")
    link = directory / name
    if way == "absolute":
        link.symlink_to(outside / "canary")
    elif way == "relative":
        link.symlink_to("../outside/canary")
    elif way == "over a link":
        (directory / "x").symlink_to(outside / "canary")
        link.symlink_to("x")
    else:
        (directory / "sub").symlink_to(outside)
        link.symlink_to("sub/canary")
    refused(directory, name, "LINK_OUT_OF_MODEL")


def test_a_shard_may_not_lead_out_either(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory, name = make_checkpoint(shards=2), "model-00002-of-00002.safetensors"
    (directory / name).rename(tmp_path / "canary")
    (directory / name).symlink_to(tmp_path / "canary")
    refused(directory, name, "LINK_OUT_OF_MODEL")


def test_links_within_the_model_are_followed(make_checkpoint: MakeCheckpoint) -> None:
    plain = build_manifest("tiny", open_checkpoint(make_checkpoint("plain")))
    directory = make_checkpoint("linked")
    (directory / "real").mkdir()
    for name in FILES:
        (directory / name).rename(directory / "real" / f"its-{name}")
        (directory / name).symlink_to(f"real/its-{name}")
    assert build_manifest("tiny", open_checkpoint(directory)) == plain


def as_cache(directory: Path, root: Path) -> Path:
    """The files of a model as the Hugging Face cache keeps them; its snapshot."""
    blobs = root / "models--org--tiny" / "blobs"
    snapshot = root / "models--org--tiny" / "snapshots" / "4f1e"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(FILES):
        (directory / name).rename(blobs / f"{number:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_a_snapshot_of_the_cache_leads_to_its_own_blobs_and_no_others(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    plain = build_manifest("tiny", open_checkpoint(make_checkpoint("plain")))
    snapshot = as_cache(make_checkpoint("a"), tmp_path / "a-cache")
    checkpoint = open_checkpoint(snapshot)
    assert build_manifest("tiny", checkpoint) == plain
    for location in blob_locations(checkpoint, plain).values():
        assert sum(map(len, read_chunks(location, "blob", 100))) == location.size

    other = as_cache(make_checkpoint("b"), tmp_path / "b-cache").parents[1] / "blobs"
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(other / f"{1:064x}")
    refused(snapshot, "tokenizer.json", "LINK_OUT_OF_MODEL")


def test_blobs_that_lead_out_themselves_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    snapshot = as_cache(make_checkpoint(), tmp_path / "cache")
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "secrets")
    blobs.symlink_to(tmp_path / "secrets")
    refused(snapshot, "config.json", "LINK_OUT_OF_MODEL")


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_and_not_waited_for(
    make_checkpoint: MakeCheckpoint, name: str
) -> None:
    directory = make_checkpoint()
    (directory / name).unlink()
    os.mkfifo(directory / name)
    refused(directory, name, "NOT_A_FILE")
    (directory / name).unlink()
    (directory / name).mkdir()
    refused(directory, name, "NOT_A_FILE")


def test_a_link_to_itself_and_one_to_nothing_are_typed_errors(
    make_checkpoint: MakeCheckpoint,
) -> None:
    directory = make_checkpoint()
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("tokenizer.json")
    refused(directory, "tokenizer.json", "MALFORMED_CHECKPOINT")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("nowhere")
    refused(directory, "tokenizer.json", "NOT_FOUND")


def test_a_file_that_was_exchanged_for_a_link_is_not_read(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """After it was looked at, and before it is hashed or sent."""
    opened = open_checkpoint(make_checkpoint())
    (tmp_path / "canary").write_text(CANARY)
    file = next(file for file in opened.files if file.name == "tokenizer.json")
    file.path.unlink()
    file.path.symlink_to(tmp_path / "canary")
    with pytest.raises(InvalidArgumentError) as caught:
        build_manifest("tiny", opened)
    assert caught.value.reason == "UNREADABLE_FILE"


def test_what_disappeared_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        open_regular(tmp_path / "nowhere")


def test_an_index_of_many_shards_is_refused(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SHARDS_LIMIT", 1)
    with pytest.raises(InvalidArgumentError, match="2 files"):
        open_checkpoint(make_checkpoint(shards=2))
