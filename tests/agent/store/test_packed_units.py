"""The packed files of a node as an operator sees and drops them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.store.packed_files import PackedFile, UnitBytes, write_packed
from edgeshard_agent.store.packed_units import PackedUnits

from edgeshard.domain.errors import DataLossError, NotFoundError
from edgeshard.domain.models.packed_units import PackedUnit

pytestmark = pytest.mark.timing

MODEL = "0123456789ab"


def name(unit: str, number: int, form: str = "int8") -> str:
    return f"{MODEL}-{unit}-{form}-{number:016x}"


@pytest.fixture
def packed(tmp_path: Path) -> PackedUnits:
    for number, unit in enumerate(["layer-10", "layer-2", "embedding", "layer-2-expert-3"]):
        (tmp_path / f"{name(unit, number)}.packed").write_bytes(bytes(100 + number))
    (tmp_path / "stray.packed").write_bytes(b"")
    return PackedUnits(tmp_path)


def test_units_are_read_from_the_names_of_their_files_in_the_order_of_layers(
    packed: PackedUnits,
) -> None:
    packed.pin([name("layer-2", 1)])
    assert [unit.unit for unit in packed.units()] == [
        "embedding",
        "layer-2",
        "layer-2-expert-3",
        "layer-10",
    ]
    assert packed.units()[1] == PackedUnit(f"{1:016x}", MODEL, "layer-2", "int8", 101, in_use=True)


def test_those_in_use_stay_and_the_others_go(packed: PackedUnits, tmp_path: Path) -> None:
    used = packed.used_bytes
    packed.pin([name("layer-2", 1)])
    asked = packed.drop_units([f"{1:016x}", f"{2:016x}"])
    assert {(unit.unit, unit.in_use) for unit in asked} == {("layer-2", True), ("embedding", False)}
    assert (tmp_path / f"{name('layer-2', 1)}.packed").exists() and packed.used_bytes == used - 102


def test_a_file_is_taken_where_it_is_not_too_large(packed: PackedUnits) -> None:
    assert packed.take(name("layer-2", 1), most=100) is None and not any(
        unit.in_use for unit in packed.units()
    )
    assert packed.take(name("layer-2", 1), most=101) == 101
    assert [unit.unit for unit in packed.units() if unit.in_use] == ["layer-2"]


def test_without_ids_all_go_that_are_not_in_use(packed: PackedUnits) -> None:
    packed.pin([name("layer-2", 1)])
    assert len(packed.drop_units([])) == 3
    assert [unit.unit for unit in packed.units()] == ["layer-2"]
    packed.unpin([name("layer-2", 1)])
    assert [unit.in_use for unit in packed.drop_units([])] == [False] and packed.units() == ()


def test_none_goes_where_one_is_not_there(packed: PackedUnits) -> None:
    with pytest.raises(NotFoundError, match="feed") as refused:
        packed.drop_units([f"{1:016x}", "feed"])
    assert refused.value.field == "ids" and len(packed.units()) == 4


def test_what_is_there_is_counted_as_it_comes_and_goes_without_a_look_at_the_disk(
    packed: PackedUnits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(packed.ids) == [0, 1, 2, 3] and packed.used_bytes == 406, (
        "a file without a name of a unit has no id"
    )
    monkeypatch.setattr(Path, "glob", None)
    form = name("layer-3", 7)
    written = packed.write(form, "key", UnitBytes((), bytes(10), [memoryview(bytes(4096))], 4096))
    assert written is not None and list(packed.ids) == [0, 1, 2, 3, 7]
    assert packed.used_bytes == 406 + written.path.stat().st_size
    (tmp_path / f"{name('embedding', 2)}.packed").unlink()
    assert list(packed.ids) == [0, 1, 2, 3, 7], "nobody said so"
    assert packed.take(name("embedding", 2)) is None and list(packed.ids) == [0, 1, 3, 7]
    written.path.write_bytes(b"x")
    with pytest.raises(DataLossError):
        packed.find(form, "key")
    assert list(packed.ids) == [0, 1, 3] and packed.used_bytes == 100 + 101 + 103


def test_what_is_taken_stays_until_it_is_let_go(packed: PackedUnits) -> None:
    assert (
        packed.take(name("layer-2", 1)) == 101 and packed.take(name("layer-10", 0), most=99) is None
    )
    packed.make_room(0)
    assert [unit.unit for unit in packed.units()] == ["layer-2"]
    packed.unpin([name("layer-2", 1)])
    packed.make_room(0)
    assert packed.units() == ()


def test_a_file_is_written_where_all_of_it_has_room_beside_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    # header, small tensors, large ones
    packed = PackedUnits(tmp_path / "packed", lambda: 3 * 12288)

    def write(number: int) -> PackedFile | None:
        return packed.write(
            name("layer-1", number), "key", UnitBytes((), bytes(1), [memoryview(bytes(4096))], 4096)
        )

    real = write_packed

    def writing(*args: Any) -> Any:
        sizes.append(packed.used_bytes)
        if len(sizes) == 2:
            assert write(3) is not None and write(4) is None, (
                "the second one counts before it is there"
            )
        return real(*args)

    monkeypatch.setattr("edgeshard_agent.store.packed_units.write_packed", writing)
    assert write(1) is not None and write(2) is not None
    assert sizes == [12288, 2 * 12288, 3 * 12288] and packed.used_bytes == 3 * 12288
    assert sum(path.stat().st_size for path in (tmp_path / "packed").iterdir()) == 3 * 12288


def test_a_file_that_the_disk_has_no_room_for_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedUnits(tmp_path / "packed")
    unit = UnitBytes((), bytes(1), [memoryview(bytes(4096))], 4096)
    monkeypatch.setattr("edgeshard.storage.files.free_bytes", lambda path: 12287)
    assert packed.write(name("layer-1", 1), "key", unit) is None and packed.used_bytes == 0
    monkeypatch.setattr("edgeshard.storage.files.free_bytes", lambda path: 12288)
    assert packed.write(name("layer-1", 1), "key", unit) is not None


def test_two_may_write_the_same_unit_at_once(tmp_path: Path) -> None:
    packed = PackedUnits(tmp_path / "packed")
    both = threading.Barrier(2)

    def pieces(value: int) -> Iterator[memoryview]:
        both.wait(30)
        yield memoryview(bytes([value]) * 4096)
        both.wait(30)

    def write() -> PackedFile | None:
        return packed.write(name("layer-1", 1), "key", UnitBytes((), bytes(1), pieces(7), 4096))

    with ThreadPoolExecutor(2) as threads:
        assert None not in [
            thread.result() for thread in [threads.submit(write), threads.submit(write)]
        ]
    (path,) = (tmp_path / "packed").iterdir()
    assert (
        path.read_bytes()[-4096:] == bytes([7]) * 4096 and packed.used_bytes == path.stat().st_size
    )
