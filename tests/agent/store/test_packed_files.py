"""Packed files: the data read equals the data written, or an error names the file."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from edgeshard_agent.store.direct import ALIGNMENT, CHUNK_BYTES, ChunkReader, ReadAbandonedError
from edgeshard_agent.store.packed_files import (
    PACKED_DAMAGED,
    PackedEntry,
    PackedFile,
    UnitBytes,
    checksum,
    write_packed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeshard.domain.errors import DataLossError
from edgeshard.domain.models.residency import in_disk_blocks

KEY = "a key"
SIZES = st.sampled_from(
    [0, 1, ALIGNMENT - 1, ALIGNMENT, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 9]
)


@pytest.fixture
def reader() -> Iterator[ChunkReader]:
    made = ChunkReader(checksum)
    yield made
    made.close()


def written(path: Path, small: int, large: int) -> tuple[PackedFile, bytes, bytes]:
    """A file of random bytes, and its two parts with their padding."""
    drawn = random.Random(small * 31 + large)
    first, second = drawn.randbytes(small), drawn.randbytes(large)
    cut = large // 3  # large tensors come in pieces
    pieces = [memoryview(second[:cut]), memoryview(second[cut:])]
    write_packed(
        path, KEY, UnitBytes((PackedEntry("w", 0, small, (small,), "uint8"),), first, pieces, large)
    )
    return (
        PackedFile(path, KEY),
        first + bytes(-small % ALIGNMENT),
        second + bytes(-large % ALIGNMENT),
    )


def room(size: int) -> memoryview:
    """Memory that a read past the page cache can fill."""
    return memoryview(mmap.mmap(-1, max(ALIGNMENT, in_disk_blocks(size))))[:size]


@given(SIZES, SIZES, st.sampled_from([None, True, False]))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_read_is_what_was_written(
    tmp_path: Path, reader: ChunkReader, small: int, large: int, cached: bool | None
) -> None:
    file, first, second = written(tmp_path / "x.packed", small, large)
    whole = room(len(first) + len(second))
    alone = room(len(first))
    behind = room(len(second))
    file.read_whole(reader, whole, cached=cached)
    assert bytes(whole) == first + second
    file.read_small(reader, alone)
    assert bytes(alone) == first
    file.read_large(reader, behind, cached=cached, is_wanted=lambda: True)
    assert bytes(behind) == second


@pytest.mark.parametrize("at", [0, ALIGNMENT, ALIGNMENT + CHUNK_BYTES, -1])
def test_a_byte_that_changed_is_noticed_and_the_file_goes(
    tmp_path: Path, reader: ChunkReader, at: int
) -> None:
    path = tmp_path / "x.packed"
    file, first, second = written(path, 100, CHUNK_BYTES + 5000)
    data = bytearray(path.read_bytes())
    place = len(data) - len(first) - len(second) + at if at >= 0 else len(data) - 1
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLossError, match="does not match its checksum") as caught:
        file.read_whole(reader, room(len(first) + len(second)))
    assert caught.value.reason == PACKED_DAMAGED
    assert not path.exists()


def test_a_file_that_is_cut_short_is_noticed_when_opened_and_when_read(
    tmp_path: Path, reader: ChunkReader
) -> None:
    path = tmp_path / "x.packed"
    file, first, second = written(path, 100, CHUNK_BYTES + 5000)
    with path.open("rb+") as cut:
        cut.truncate(path.stat().st_size - ALIGNMENT)
    with pytest.raises(DataLossError, match="its header declares"):
        PackedFile(path, KEY)
    with pytest.raises(DataLossError) as caught:
        file.read_whole(reader, room(len(first) + len(second)))
    assert caught.value.reason == PACKED_DAMAGED


def test_every_byte_of_a_header_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.packed"
    written(path, 100, 100)
    data = path.read_bytes()
    # The last bytes of the header's blocks are padding.
    for place in range(data.rindex(b"}", 0, data.index(bytes(64))) + 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :])
        with pytest.raises(DataLossError):
            PackedFile(path, KEY)


def test_a_read_that_nobody_wants_any_more_ends_early(tmp_path: Path) -> None:
    file, _, second = written(tmp_path / "x.packed", 0, 4 * CHUNK_BYTES)
    sizes: list[int] = []
    reader = ChunkReader(checksum, threads=1, pace=sizes.append)
    with pytest.raises(ReadAbandonedError):
        file.read_large(reader, room(len(second)), is_wanted=lambda: len(sizes) < 3)
    reader.close()
    assert len(sizes) == 3, "it is asked before each piece"
    assert sum(sizes) < CHUNK_BYTES
    assert file.path.exists()
