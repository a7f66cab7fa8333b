"""Lines in files of bounded size: the newest are kept, in order, whatever ended the process that
wrote them."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
from edgeshard_coordinator.control.persistence.rotated import RotatedLines
from edgeshard_coordinator.core.values.seals import SealKey
from hypothesis import given, settings
from hypothesis import strategies as st

LIMIT, KEPT = 100, 3


def lines_in(directory: Path) -> RotatedLines:
    return RotatedLines(directory, "a", LIMIT, KEPT)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=20),
    st.integers(1, 30),
)
def test_the_newest_are_kept_and_no_more_than_fit(batches: list[list[int]], wanted: int) -> None:
    """Each batch by a writer of its own or by the same one."""
    with tempfile.TemporaryDirectory() as name:
        directory, written = Path(name) / "audit", list[bytes]()
        file = lines_in(directory)
        for number, sizes in enumerate(batches):
            lines = [
                f"{len(written) + index}".encode().ljust(size) + b"\n"
                for index, size in enumerate(sizes)
            ]
            file.append(lines)
            written += lines
            if number % 3 == 2:
                file.close()
                file = lines_in(directory)
        found = file.newest(wanted)
        file.close()
        assert found == written[-len(found) :] and len(found) <= wanted
        assert len(found) == min(wanted, len(written)) or sum(map(len, found)) > (KEPT - 1) * (
            LIMIT - 61
        )
        sizes = [path.stat().st_size for path in directory.iterdir()]
        assert len(sizes) <= KEPT and max(sizes) <= LIMIT


def test_they_are_their_owners_alone(tmp_path: Path) -> None:
    lines_in(tmp_path / "audit").append([b"one\n"])
    (path,) = (tmp_path / "audit").iterdir()
    assert (
        stat.S_IMODE(path.stat().st_mode) == 0o600
        and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    )


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


KEY = SealKey(b"k" * 32)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=12), st.integers(0, 3))
def test_sealed_files_are_sound_over_rotations_and_restarts(batches: list[int], every: int) -> None:
    """Whatever the sizes of batches and files; processes end in an orderly way or not."""
    with tempfile.TemporaryDirectory() as name:
        file, count = RotatedLines(Path(name), "a", 5000, 3, KEY), 0
        for number, size in enumerate(batches):
            file.append([f"{count + index:30}\n".encode() for index in range(size)])
            count += size
            if every and number % every == 0:
                if number % 2:
                    file.close()
                else:
                    file._drop()
                file = RotatedLines(Path(name), "a", 5000, 3, KEY)
        checks = file.check()
        found = file.newest(10)
        file.close()
        assert [check.why for check in checks if check.broken_at] == [] and checks[
            -1
        ].sealed == checks[-1].lines
        assert [int(line) for line in found] == list(range(count))[-10:]
        assert max(path.stat().st_size for path in Path(name).iterdir()) <= 5000


def test_files_that_were_changed_are_named(tmp_path: Path) -> None:
    file = RotatedLines(tmp_path, "a", 1000, 4, KEY)
    file.append([f"{number:30}\n".encode() for number in range(95)])
    assert [check.broken_at for check in file.check()] == [0, 0, 0, 0]
    middle = tmp_path / "a.2.jsonl"
    kept = middle.read_bytes()
    middle.write_bytes(kept.replace(b" ", b"0", 1))
    assert [(check.file, check.broken_at) for check in file.check() if check.broken_at] == [
        ("a.2.jsonl", 1)
    ]
    middle.unlink()
    assert [(check.file, check.broken_at) for check in file.check() if check.broken_at] == [
        ("a.1.jsonl", 1)
    ]
    middle.write_bytes(kept)
    assert not [check for check in file.check() if check.broken_at]
    (tmp_path / "a.jsonl").unlink()
    assert [check.file for check in file.check() if check.broken_at] == ["a.1.jsonl"]


def test_an_end_that_is_cut_off_under_a_writer_stays_found(tmp_path: Path) -> None:
    file = RotatedLines(tmp_path, "a", 10_000, 4, KEY)
    file.append([b"one\n", b"two\n"])
    file.check()
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    file._drop()  # as after an error of the disk
    file.append([b"three\n"])
    assert [check.broken_at for check in file.check()] == [1]
