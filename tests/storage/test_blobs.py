"""The stored blobs after a power cut: a disk that holds only synced data, whenever the power
fails."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from edgeshard.domain.errors import DataLossError
from edgeshard.domain.ids import Digest
from edgeshard.storage.blobs import BlobDirectory
from edgeshard.storage.files import write_atomically

CONTENT = bytes(range(256)) * 40
DIGEST = Digest(hashlib.sha256(CONTENT).hexdigest())


class Disk:
    """Follows `fsync` and `rename`: the disk has a file's last synced content, and a directory's
    names of its last sync.

    A new name may reach the disk at any time. So a file must be synced before it gets its name, and
    the directory after that, or the name may never get there.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes_of: dict[int, bytes] = {}
        self.names_in: dict[int, frozenset[str]] = {}
        self.renamed: dict[str, bytes] = {}
        """By the new name's path: the bytes on the disk at the moment of the rename."""
        real_fsync, real_rename = os.fsync, os.rename

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                self.names_in[status.st_ino] = frozenset(os.listdir(descriptor))
            else:
                self.bytes_of[status.st_ino] = os.pread(descriptor, status.st_size, 0)

        def rename(source: Path, target: Path) -> None:
            self.renamed[os.fspath(target)] = self.read(Path(source))
            real_rename(source, target)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", rename)

    def read(self, path: Path) -> bytes:
        """A file's bytes after a power cut."""
        return self.bytes_of.get(path.stat().st_ino, b"")

    def lists(self, path: Path) -> bool:
        """Whether the file's name is there after a power cut."""
        return path.name in self.names_in.get(path.parent.stat().st_ino, frozenset())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobDirectory:
    made = BlobDirectory(tmp_path)
    made.create()
    return made


def write_all(blobs: BlobDirectory, begin: int = 0) -> None:
    for offset in range(begin, len(CONTENT), 1000):
        blobs.write(DIGEST, offset, CONTENT[offset : offset + 1000])


def test_a_blob_has_its_name_only_when_its_bytes_are_on_the_disk(
    blobs: BlobDirectory, disk: Disk
) -> None:
    """The bytes of a named blob are not checked when a model is added: only its size is
    compared."""
    blobs.truncate(DIGEST, 0)
    write_all(blobs)
    blobs.commit(DIGEST, len(CONTENT))
    path = blobs.path(DIGEST)
    assert disk.renamed == {str(path): CONTENT}, "the power may go as soon as the name is there"
    assert disk.lists(path) and disk.read(path) == CONTENT, "a commit that returned stays"


def test_what_was_written_behind_an_earlier_sync_is_synced_too(
    blobs: BlobDirectory, disk: Disk
) -> None:
    """An upload that was taken up again: its beginning is on the disk, its end only when it is
    synced again."""
    blobs.truncate(DIGEST, 0)
    blobs.write(DIGEST, 0, CONTENT[:3000])
    descriptor = os.open(blobs.partial_path(DIGEST), os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    write_all(blobs, 3000)
    blobs.commit(DIGEST, len(CONTENT))
    assert disk.renamed == {str(blobs.path(DIGEST)): CONTENT}


@pytest.mark.parametrize("lost", [1, 1000, len(CONTENT)])
def test_a_partial_blob_whose_end_never_reached_the_disk_is_not_taken_for_whole(
    blobs: BlobDirectory, disk: Disk, lost: int
) -> None:
    """The file system kept the length and lost the bytes: zeros replaced them."""
    blobs.truncate(DIGEST, 0)
    blobs.write(DIGEST, 0, CONTENT[: len(CONTENT) - lost] + bytes(lost - 1) + b"\1")
    with pytest.raises(DataLossError):
        blobs.commit(DIGEST, len(CONTENT))
    assert not disk.renamed and blobs.received(DIGEST) == 0, "it begins anew"
    assert blobs.size(DIGEST) is None


def test_a_blob_of_another_length_is_refused(blobs: BlobDirectory) -> None:
    for data, size in (
        (CONTENT, len(CONTENT) + 1),
        (CONTENT + b"\0", len(CONTENT)),
        (CONTENT[:-1], len(CONTENT)),
    ):
        blobs.truncate(DIGEST, 0)
        blobs.write(DIGEST, 0, data)
        with pytest.raises(DataLossError):
            blobs.commit(DIGEST, size)
        assert blobs.size(DIGEST) is None and blobs.received(DIGEST) == 0


def test_a_replaced_text_is_the_old_or_the_new_one_whenever_the_power_goes(
    tmp_path: Path, disk: Disk
) -> None:
    path = tmp_path / "deep" / "names.json"
    for text in ("old", "a new one", ""):
        write_atomically(path, text)
        assert disk.renamed[str(path)] == text.encode(), (
            "the name stood for bytes that the disk did not have"
        )
        assert disk.lists(path) and disk.read(path) == text.encode()
        assert path.read_text() == text
