"""A disk without room: the error has the needed and the free bytes, and the remedy of the place."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.storage.files import (
    MOVE_SCRATCH,
    check_room,
    free_bytes,
    full_disk,
    naming_full_disk,
)

MORE = 1 << 62
"""Bytes that no disk has."""


def test_what_does_not_fit_is_refused_with_needed_and_free_bytes(tmp_path: Path) -> None:
    check_room(tmp_path / "new" / "file", "the copy", 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        check_room(tmp_path / "new" / "file", "the copy", MORE)
    error = caught.value
    assert (error.reason, error.field) == ("DISK_FULL", "state-dir")
    assert error.message.startswith(
        f"the copy needs {MORE} bytes on the disk of {tmp_path / 'new'}, where "
    )
    assert error.message.endswith(" bytes are free; free space or move --state-dir")


def test_reserved_bytes_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ResourceExhaustedError, match=r"needs 9 bytes .*bytes are free, \d+ of them reserved; "
    ):
        check_room(tmp_path / "file", "the copy", 9, 8)
    check_room(tmp_path / "file", "the copy", free_bytes(tmp_path) + 1, MORE)  # others will go


def test_a_disk_that_fills_meanwhile_is_named_too(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceExhaustedError, match=r"the copy needs 12 bytes .* set TMPDIR"),
        naming_full_disk(tmp_path / "file", "the copy", 12, MOVE_SCRATCH),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), naming_full_disk(tmp_path / "file"):
        raise PermissionError
    assert full_disk(tmp_path / "file", "state").message.startswith(
        "state has no room on the disk of "
    )
