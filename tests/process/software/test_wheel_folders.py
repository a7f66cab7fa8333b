"""Bundles: every byte of an archive counts, and a folder must match its checksums."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from edgeshard.process.wheel_folders import CHECKSUMS, check_folder, unpack
from tests.support.forms import in_form
from tools.release.archives import Entry, checksums, write_tar

FILES = {
    "install.sh": b"echo\n",
    "requirements.txt": b"edgeshard==1\n",
    "edgeshard-1-py3-none-any.whl": b"w" * 700,
}
_INSIGNIFICANT = 155
"""The byte of a tar header that no reader looks at: it follows the end of the header's checksum."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "edgeshard-1"
    made.mkdir()
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    (made / CHECKSUMS).write_text(checksums(made))
    return made


@pytest.fixture
def bundle(folder: Path) -> Path:
    path = folder.with_suffix(".tar")
    with path.open("wb") as file:
        write_tar(file, [Entry(each.name, each) for each in folder.iterdir()], 0, f"{folder.name}/")
    return path


def into(tmp_path: Path) -> Path:
    directory = tmp_path / "into"
    directory.mkdir()
    return directory


def test_a_bundle_is_unpacked_as_it_was_packed(tmp_path: Path, bundle: Path) -> None:
    found = unpack(bundle, into(tmp_path))
    assert {
        path.name: path.read_bytes() for path in found.iterdir() if path.name != CHECKSUMS
    } == FILES


def test_each_changed_byte_of_a_bundle_is_found(tmp_path: Path, bundle: Path) -> None:
    content = bundle.read_bytes()
    undetected = []
    for position in range(0, len(content), in_form(23, 1)):
        changed = bytearray(content)
        changed[position] ^= 0x01
        bundle.write_bytes(changed)
        directory = tmp_path / str(position)
        directory.mkdir()
        try:
            unpack(bundle, directory)
        except EdgeShardError as error:
            assert error.field == "from"
        else:
            undetected.append(position)
    assert {position % 512 for position in undetected} <= {_INSIGNIFICANT}
    assert len(undetected) <= len(FILES) + 1


def test_a_bundle_that_ends_early_is_refused(tmp_path: Path, bundle: Path) -> None:
    content = bundle.read_bytes()
    for size in range(0, 4096, 100):
        bundle.write_bytes(content[:size])
        directory = tmp_path / str(size)
        directory.mkdir()
        with pytest.raises((DataLossError, InvalidArgumentError)):
            unpack(bundle, directory)


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "a/b/c", "a/..", "a/.hidden", "outside"]
)
def test_members_outside_of_one_folder_are_refused(tmp_path: Path, bundle: Path, name: str) -> None:
    with tarfile.open(bundle, "a") as archive:
        member = tarfile.TarInfo(name)
        member.size = 4
        archive.addfile(member, io.BytesIO(b"text"))
    directory = into(tmp_path)
    with pytest.raises(InvalidArgumentError, match="one folder"):
        unpack(bundle, directory)
    assert not any(directory.iterdir())


def test_links_are_refused(tmp_path: Path, bundle: Path) -> None:
    with tarfile.open(bundle, "a") as archive:
        member = tarfile.TarInfo("edgeshard-1/link")
        member.type = tarfile.SYMTYPE
        member.linkname = "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(InvalidArgumentError, match="one folder"):
        unpack(bundle, into(tmp_path))


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    directory = into(tmp_path)
    with pytest.raises(FailedPreconditionError, match="10 are free"):
        unpack(bundle, directory)
    assert not any(directory.iterdir())


def test_checksums_without_the_installer_are_no_folder_of_wheels(folder: Path) -> None:
    (folder / "install.sh").unlink()
    (folder / CHECKSUMS).write_text(checksums(folder))
    with pytest.raises(InvalidArgumentError, match=r"install\.sh"):
        check_folder(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="No such file"):
        unpack(tmp_path / "none.tar", into(tmp_path))
    with pytest.raises(InvalidArgumentError, match="SHA256SUMS"):
        check_folder(tmp_path / "into")
