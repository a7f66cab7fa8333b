"""The rate at which a disk is read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from edgeshard_agent.measuring import disk
from edgeshard_agent.measuring.disk import Extent, measure_disk

SMALL = Extent(4 << 20, 5.0, 1 << 20)


def test_a_disk_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure_disk(tmp_path, SMALL)
    if found is None:
        pytest.skip("this file system has no direct reading")
    assert 1e5 < found.read_bytes_per_s < 1e12 and 1e4 < found.write_bytes_per_s < 1e12
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_it_ends_in_time_and_after_one_piece_at_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = os.write

    def write(file: int, data: bytes) -> int:
        written.append(len(data))
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    measure_disk(tmp_path, Extent(64 << 20, 0.0, 1 << 20))
    assert written == [1 << 20]


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "disk_bytes", lambda directory: (1 << 40, 10 << 20))
    monkeypatch.setattr(
        tempfile, "NamedTemporaryFile", lambda **options: pytest.fail("it was written to")
    )
    assert measure_disk(tmp_path, SMALL) is None


def test_a_directory_that_is_not_there_has_no_rate(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "nowhere", SMALL) is None


def test_a_file_system_without_direct_reading_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *options: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk, "_read", refused)
    assert measure_disk(tmp_path, SMALL) is None
