"""Lines in files of bounded size: the newest are kept, in order, whatever ended the process that wrote them."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
from edgeshard_coordinator.control.rotated import RotatedLines
from hypothesis import given, settings
from hypothesis import strategies as st

LIMIT, KEPT = 100, 3


def lines_in(directory: Path) -> RotatedLines:
    return RotatedLines(directory, "a", LIMIT, KEPT)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=20), st.integers(1, 30))
def test_the_newest_are_kept_and_no_more_than_fit(batches: list[list[int]], wanted: int) -> None:
    """Each batch by a writer of its own or by the same one."""
    with tempfile.TemporaryDirectory() as name:
        directory, written = Path(name) / "audit", list[bytes]()
        file = lines_in(directory)
        for number, sizes in enumerate(batches):
            lines = [f"{len(written) + index}".encode().ljust(size) + b"\n" for index, size in enumerate(sizes)]
            file.append(lines)
            written += lines
            if number % 3 == 2:
                file.close()
                file = lines_in(directory)
        found = file.newest(wanted)
        file.close()
        assert found == written[-len(found) :] and len(found) <= wanted
        assert len(found) == min(wanted, len(written)) or sum(map(len, found)) > (KEPT - 1) * (LIMIT - 61)
        sizes = [path.stat().st_size for path in directory.iterdir()]
        assert len(sizes) <= KEPT and max(sizes) <= LIMIT


def test_they_are_their_owners_alone(tmp_path: Path) -> None:
    lines_in(tmp_path / "audit").append([b"one\n"])
    (path,) = (tmp_path / "audit").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    lines_in(tmp_path).append([b"one\n"])
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"tw")
    after = lines_in(tmp_path)
    assert after.newest(5) == [b"one\n"]
    after.append([b"three\n"])
    assert after.newest(5) == [b"one\n", b"tw\n", b"three\n"]


def test_a_disk_that_refuses_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("in the way")
    file = lines_in(tmp_path / "audit")
    with pytest.raises(OSError):
        file.append([b"one\n"])
    (tmp_path / "audit").unlink()
    file.append([b"two\n"])
    assert file.newest(5) == [b"two\n"]


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        lines_in(tmp_path).append([b"one\n"])
    assert not (tmp_path / "elsewhere").exists()
