"""The surface of a tree is found, and the differences between two trees are reported."""

from __future__ import annotations

from pathlib import Path

from tools.compare_surface import differences, surface

ROOT = Path(__file__).resolve().parents[2]


def test_a_trees_surface_has_its_commands_routes_metrics_and_messages() -> None:
    found = surface(ROOT)
    assert any(line.startswith("edgectl serve --nodes N int default 1:") for line in found["help"])
    assert any(line.startswith("edgeshard-agent: --listen") for line in found["help"])
    assert any(line.startswith("paths /v1/chat/completions post") for line in found["openapi"])
    assert (
        "edgeshard_http_requests" in found["metrics"]
        and "edgeshard_stage_busy_ratio" in found["metrics"]
    )
    assert any(
        line.startswith("edgeshard.proto.v1.") and " = 1 " in line for line in found["proto"]
    )


def test_what_is_lost_and_gained_is_said_by_part() -> None:
    old, new = {"help": {"a", "b"}, "proto": {"m"}}, {"help": {"b", "c"}, "proto": {"m"}}
    assert differences(old, new) == ["- help a", "+ help c"]
    assert differences(new, new) == []
