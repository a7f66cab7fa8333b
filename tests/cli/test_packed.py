"""edgectl describe node and delete packed: the packed units of a node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.models.packed_units import PackedUnit

IDLE = PackedUnit(
    "00000000000000aa", "0123456789ab", "layer-3", "int8", 4 << 20, False, "fairy-tales"
)
USED = PackedUnit(
    "00000000000000bb", "0123456789ab", "layer-4", "int8", 2 << 20, True, "fairy-tales"
)
OTHER = PackedUnit("00000000000000cc", "ba9876543210", "head", "bfloat16", 1 << 20, False)


@pytest.fixture(autouse=True)
def keeps(site: Any) -> None:
    site.packed = [IDLE, USED, OTHER]


def test_describe_node_lists_them(edgectl: Any, site: Any) -> None:
    shown = edgectl("describe", "node", "a").stdout
    assert "Packed:       3 units, 7 MiB; 2 MiB in use" in shown
    lines = shown.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("ID"))
    assert lines[first].split() == ["ID", "MODEL", "UNIT", "FORM", "SIZE", "IN", "USE"]
    assert lines[first + 2].split() == [
        USED.id,
        "fairy-tales",
        "layer-4",
        "int8",
        "2",
        "MiB",
        "yes",
    ]
    assert "ba9876543210" in lines[first + 3]
    assert max(len(line.rstrip()) for line in lines[first : first + 4]) <= 80
    data = json.loads(edgectl("describe", "node", "a", "-o", "json").stdout)["packed"]
    assert [unit["id"] for unit in data] == [IDLE.id, USED.id, OTHER.id] and data[1][
        "in_use"
    ] is True


def test_a_node_that_cannot_be_asked_is_described_without_them(edgectl: Any, site: Any) -> None:
    site.failures["ListPacked"] = UnavailableError("the node is not connected", reason="NODE_AWAY")
    shown = edgectl("describe", "node", "b")
    assert shown.exit_code == 0 and "unknown: the node is not connected" in shown.stdout
    assert json.loads(edgectl("describe", "node", "b", "-o", "json").stdout)["packed"] is None


def test_those_that_are_not_in_use_are_deleted(edgectl: Any, site: Any) -> None:
    result = edgectl("delete", "packed", "a", "--unused")
    assert (
        result.exit_code == 0 and result.stdout == "2 packed units of node a deleted: 5 MiB freed\n"
    )
    assert site.packed == [USED]


def test_one_in_use_is_refused_by_name_and_the_others_go(edgectl: Any, site: Any) -> None:
    result = edgectl("delete", "packed", "a", IDLE.id, USED.id)
    assert result.stdout == "1 packed unit of node a deleted: 4 MiB freed\n"
    assert result.exit_code != 0 and f"{USED.id} (layer-4 of fairy-tales)" in result.stderr
    assert site.packed == [USED, OTHER]


def test_what_was_asked_for_as_data(edgectl: Any) -> None:
    result = edgectl("delete", "packed", "a", IDLE.id, "-o", "json")
    assert [unit["unit"] for unit in json.loads(result.stdout)] == ["layer-3"]


@pytest.mark.parametrize("line", [(), (IDLE.id, "--unused")])
def test_either_ids_or_all(edgectl: Any, site: Any, line: tuple[str, ...]) -> None:
    result = edgectl("delete", "packed", "a", *line)
    assert result.exit_code == 2 and "--unused" in result.stderr and len(site.packed) == 3
