"""Files of models that a store uses in place."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeshard.domain.control.site import WeightsFile
from edgeshard.domain.errors import DataLossError, ResourceExhaustedError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import RowOrder
from edgeshard.storage.blobs import BlobDirectory
from edgeshard.storage.linked import LinkedFiles
from edgeshard.storage.locations import (
    CHANGED_SINCE_ADDED,
    BlobLocation,
    open_location,
    read_chunks,
)

DATA = b"header" + b"first " * 100 + b"second" * 50


def digest_of(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


FIRST, SECOND = digest_of(DATA[6:606]), digest_of(DATA[606:])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


def take(
    linked: LinkedFiles, source: Path, room_bytes: int = 1 << 30, *, stays: bool = False
) -> Path:
    with source.open("rb") as file:
        whole = linked.take(source, file, lambda: room_bytes, stays=stays)
    linked.keep(
        {FIRST: replace(whole, offset=6, size=600), SECOND: replace(whole, offset=606, size=300)}
    )
    return whole.path


def test_blobs_lie_in_the_file_itself_and_outlive_its_name(tmp_path: Path, source: Path) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    path = take(blobs.linked, source)
    assert path.stat().st_ino == source.stat().st_ino, "one file, not two"
    source.unlink()
    assert blobs.size(SECOND) == 300 and blobs.is_intact(FIRST, 600)
    assert blobs.read(SECOND, 294, 100) == b"second", "not beyond the blob"
    assert BlobDirectory(tmp_path / "store").locate(FIRST) == BlobLocation(
        path, 6, 600, True, source
    ), "after a restart too"


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
    assert reader.find(FIRST) == BlobLocation(path, 6, 600, True, source)


def test_what_a_dead_process_left_goes_and_a_damaged_note_is_as_none(
    tmp_path: Path, source: Path
) -> None:
    linked = LinkedFiles(tmp_path / "linked")
    path = take(linked, source)
    stray = path.with_name("stray.tmp")
    stray.write_bytes(b"half")
    linked.drop_unused()
    assert path.exists() and not stray.exists()
    note = path.with_name(path.name + ".json")
    for text in (
        "",
        "{}",
        json.dumps({"blobs": {"../x": [0, 1]}}),
        json.dumps({"blobs": {FIRST: [0]}}),
        "[]",
    ):
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
    with pytest.raises(
        ResourceExhaustedError, match=f"needs {len(DATA)} bytes on the disk of {path.parent}"
    ):
        take(linked, source, room_bytes=len(DATA) - 1)
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, path.name + ".json"]


def written_to(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(700)
        file.write(b"x")


def cut_short(path: Path) -> None:
    os.truncate(path, 610)


def replaced_by_a_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.usefixtures("no_links")
def test_a_file_that_stays_is_read_in_place(tmp_path: Path, source: Path) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    assert take(blobs.linked, source, room_bytes=0, stays=True) == source
    assert [path.suffix for path in blobs.linked.directory.iterdir()] == [".json"], "no second copy"
    again = BlobDirectory(tmp_path / "store")
    assert again.is_intact(FIRST, 600) and again.read(SECOND, 294, 100) == b"second"
    assert again.linked.files_of({FIRST, SECOND}) == (WeightsFile(str(source), 900, True, False),)
    again.linked.drop_unused()
    again.remove(FIRST)
    assert again.size(SECOND) == 300
    again.remove(SECOND)
    again.linked.drop_unused([source])
    assert source.read_bytes() == DATA, "it is not the store's"
    assert not [*blobs.linked.directory.iterdir()]


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize(
    "change", [Path.unlink, written_to, cut_short, replaced_by_a_link, os.utime]
)
def test_a_file_that_changed_is_not_read_and_is_named(
    tmp_path: Path, source: Path, change: Callable[[Path], None]
) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    take(blobs.linked, source, stays=True)
    location = blobs.locate(FIRST)
    assert location is not None
    change(source)
    assert blobs.size(FIRST) is None and not blobs.is_intact(FIRST, 600)
    for read in (lambda: blobs.read(FIRST, 0, 1), lambda: open_location(location)):
        with pytest.raises(DataLossError, match=str(source)) as refused:
            read()
        assert refused.value.reason == CHANGED_SINCE_ADDED
    assert blobs.linked.files_of({FIRST}) == (WeightsFile(str(source), 600, True, True),)
    source.unlink(missing_ok=True)
    source.write_bytes(DATA)
    take(blobs.linked, source, stays=True)
    assert blobs.is_intact(FIRST, 600) and blobs.is_intact(SECOND, 300), "added again"
    assert len([*blobs.linked.directory.iterdir()]) == 1


@pytest.mark.usefixtures("no_links")
def test_a_change_that_keeps_size_and_time_is_not_trusted_once_it_was_found(
    tmp_path: Path, source: Path
) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    take(blobs.linked, source, stays=True)
    status = source.stat()
    written_to(source)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not blobs.is_intact(SECOND, 300)
    error = blobs.linked.distrust(SECOND)
    assert error is not None and str(source) in error.message
    assert BlobDirectory(tmp_path / "store").locate(FIRST) is None, (
        "nothing of this file, after a restart too"
    )


def test_rows_are_read_in_the_models_order(source: Path) -> None:
    order = RowOrder(3, 2, 5)
    location = BlobLocation(source, 6, 60, order=order)
    rows = [DATA[6 + 5 * row : 11 + 5 * row] for row in range(12)]
    expected = b"".join(rows[row] for row in (0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11))
    for chunk_bytes in (1, 7, 60):
        for start in (0, 4, 59):
            assert b"".join(read_chunks(location, "blob", chunk_bytes, start)) == expected[start:]


@pytest.mark.usefixtures("no_links")
def test_an_order_of_rows_outlives_a_restart(tmp_path: Path, source: Path) -> None:
    blobs = BlobDirectory(tmp_path / "store")
    with source.open("rb") as file:
        whole = blobs.linked.take(source, file, lambda: 0, stays=True)
    blobs.linked.keep({FIRST: replace(whole, offset=6, size=600, order=RowOrder(3, 2, 5))})
    found = BlobDirectory(tmp_path / "store").locate(FIRST)
    assert found is not None and found.order == RowOrder(3, 2, 5)
