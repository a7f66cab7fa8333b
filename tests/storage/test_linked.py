"""Files of models that a store uses where they lie."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.ids import Digest
from edgeshard.storage.blobs import BlobDirectory
from edgeshard.storage.linked import BlobLocation, LinkedFiles

DATA = b"header" + b"first " * 100 + b"second" * 50


def digest_of(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


FIRST, SECOND = digest_of(DATA[6:606]), digest_of(DATA[606:])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


def take(linked: LinkedFiles, source: Path, room_bytes: int = 1 << 30) -> Path:
    with source.open("rb") as file:
        path = linked.take(source, file, lambda: room_bytes)
    linked.keep({FIRST: BlobLocation(path, 6, 600), SECOND: BlobLocation(path, 606, 300)})
    return path


def test_blobs_lie_in_the_file_itself_and_outlive_its_name(tmp_path: Path, source: Path) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    path = take(blobs.linked, source)
    assert path.stat().st_ino == source.stat().st_ino, "one file, not two"
    source.unlink()
    assert blobs.size(SECOND) == 300 and blobs.is_intact(FIRST, 600)
    assert blobs.read(SECOND, 294, 100) == b"second", "not beyond the blob"
    assert BlobDirectory(tmp_path / "store").locate(FIRST) == BlobLocation(path, 6, 600, True), "after a restart too"


def test_the_file_goes_with_the_last_of_its_blobs(tmp_path: Path, source: Path) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    path = take(blobs.linked, source)
    blobs.remove(FIRST)
    assert blobs.size(FIRST) is None and blobs.size(SECOND) == 300 and path.exists()
    blobs.remove(SECOND)
    assert list(path.parent.iterdir()) == [] and source.read_bytes() == DATA


def test_what_its_owner_wrote_into_is_not_intact(tmp_path: Path, source: Path) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    take(blobs.linked, source)
    with source.open("r+b") as file:
        file.seek(10)
        file.write(b"x")
    assert blobs.is_intact(SECOND, 300) and not blobs.is_intact(FIRST, 600)
    with source.open("r+b") as file:
        file.truncate(610)
    assert blobs.locate(SECOND) is None and blobs.locate(FIRST) is not None


def test_another_process_sees_what_was_noted_since(tmp_path: Path, source: Path) -> None:
    reader = LinkedFiles(tmp_path / "linked")
    assert reader.find(FIRST) is None
    path = take(LinkedFiles(tmp_path / "linked"), source)
    assert reader.find(FIRST) == BlobLocation(path, 6, 600, True)


def test_what_a_dead_process_left_goes_and_a_damaged_note_is_as_none(tmp_path: Path, source: Path) -> None:
    linked = LinkedFiles(tmp_path / "linked")
    path = take(linked, source)
    stray = path.with_name("stray.tmp")
    stray.write_bytes(b"half")
    linked.drop_unused()
    assert path.exists() and not stray.exists()
    note = path.with_name(path.name + ".json")
    for text in ("", "{}", json.dumps({"blobs": {"../x": [0, 1]}}), json.dumps({"blobs": {FIRST: [0]}}), "[]"):
        note.write_text(text)
        again = LinkedFiles(tmp_path / "linked")
        assert again.find(FIRST) is None
    again.drop_unused()
    assert not path.exists()


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory of another file system."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_across_file_systems_it_is_a_copy_for_which_there_must_be_room(
    tmp_path: Path, source: Path, elsewhere: Path
) -> None:
    if elsewhere.stat().st_dev == source.stat().st_dev:
        pytest.skip("there is no second file system")
    linked = LinkedFiles(elsewhere / "linked")
    path = take(linked, source)
    assert path.read_bytes() == DATA and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ResourceExhaustedError, match=f"needs {len(DATA)} bytes on the disk of {path.parent}"):
        take(linked, source, room_bytes=len(DATA) - 1)
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, path.name + ".json"]
