"""The packed files of a box as an operator sees and drops them."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeshard_agent.store.packed_units import PackedUnits

from edgeshard.domain.errors import DataLossError, NotFoundError
from edgeshard.domain.packed import PackedUnit

MODEL = "0123456789ab"


def name(unit: str, number: int, form: str = "int8") -> str:
    return f"{MODEL}-{unit}-{form}-{number:016x}"


@pytest.fixture
def packed(tmp_path: Path) -> PackedUnits:
    for number, unit in enumerate(["layer-10", "layer-2", "embedding", "layer-2-expert-3"]):
        (tmp_path / f"{name(unit, number)}.packed").write_bytes(bytes(100 + number))
    (tmp_path / "stray.packed").write_bytes(b"")
    return PackedUnits(tmp_path)


def test_units_are_read_from_the_names_of_their_files_in_the_order_of_layers(packed: PackedUnits) -> None:
    packed.pin([name("layer-2", 1)])
    assert [unit.unit for unit in packed.units()] == ["embedding", "layer-2", "layer-2-expert-3", "layer-10"]
    assert packed.units()[1] == PackedUnit(f"{1:016x}", MODEL, "layer-2", "int8", 101, in_use=True)


def test_those_in_use_stay_and_the_others_go(packed: PackedUnits, tmp_path: Path) -> None:
    used = packed.used_bytes
    packed.pin([name("layer-2", 1)])
    asked = packed.drop_units([f"{1:016x}", f"{2:016x}"])
    assert {(unit.unit, unit.in_use) for unit in asked} == {("layer-2", True), ("embedding", False)}
    assert (tmp_path / f"{name('layer-2', 1)}.packed").exists() and packed.used_bytes == used - 102


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
    assert list(packed.ids) == [0, 1, 2, 3] and packed.used_bytes == 406, "a file without a name of a unit has no id"
    monkeypatch.setattr(Path, "glob", None)
    packed.allow(1 << 20)
    form = name("layer-3", 7)
    written = packed.write(form, "key", [], bytes(10), [memoryview(bytes(4096))], 4096)
    assert written is not None and list(packed.ids) == [0, 1, 2, 3, 7]
    assert packed.used_bytes == 406 + written.path.stat().st_size
    assert packed.drop(name("layer-2", 1)) == 101 and list(packed.ids) == [0, 2, 3, 7]
    (tmp_path / f"{name('embedding', 2)}.packed").unlink()
    assert list(packed.ids) == [0, 2, 3, 7], "nobody said so"
    assert not packed.has(name("embedding", 2)) and list(packed.ids) == [0, 3, 7]
    written.path.write_bytes(b"x")
    with pytest.raises(DataLossError):
        packed.find(form, "key")
    assert list(packed.ids) == [0, 3] and packed.used_bytes == 100 + 103
