"""The kernels of nodes as operators see them: in words, as warnings, and as faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgeshard.cli.commands.observing.doctor_checks import Facts, Fault, diagnose
from edgeshard.cli.render.kernel_views import (
    kernel_lines,
    kernel_problem,
    kernel_text,
    kernel_warnings,
)
from edgeshard.cli.render.views import node_fields
from edgeshard.client import Site
from edgeshard.domain.nodes.kernels import KernelSpeed

SOUND = KernelSpeed("avx2", "avx2", "gcc 12.2.0", 12.0, 90.0, 9.0, 60.0)
MISSING = KernelSpeed()
SLOW = replace(SOUND, row_gb_per_s=1.6)
LESSER = replace(SOUND, best_name="avxvnni")


def with_kernels(site: Any, speed: KernelSpeed | None) -> tuple[Any, ...]:
    return tuple(
        replace(node, connected=True, condition=None, facts=replace(node.facts, kernels=speed))
        for node in site.nodes
    )


def test_the_text_has_set_compiler_and_shares() -> None:
    expected = (
        "avx2 by gcc 12.2.0, one row 75% of the read rate (12.0 GB/s), many rows 67% of the "
        "FMA rate (90 GFLOP/s)"
    )
    assert kernel_text(SOUND) == expected
    assert "torch" in kernel_text(MISSING)


@pytest.mark.parametrize(
    ("speed", "words"), [(MISSING, "missing"), (SLOW, "13% of the read rate"), (LESSER, "avxvnni")]
)
def test_a_fault_is_a_warning_with_a_remedy(speed: KernelSpeed, words: str, site: Any) -> None:
    nodes = with_kernels(site, speed)
    warnings = list(kernel_warnings(nodes))
    assert len(warnings) == len(nodes)
    assert words in warnings[0] and nodes[0].name in warnings[0] and "hatch_build.py" in warnings[0]
    assert words in node_fields(nodes[0])["Warning"]
    assert len(list(kernel_lines(nodes))) == len(nodes)


@pytest.mark.parametrize("speed", [SOUND, None], ids=["sound", "an older agent"])
def test_a_sound_node_has_no_warning(speed: KernelSpeed | None, site: Any) -> None:
    nodes = with_kernels(site, speed)
    assert list(kernel_warnings(nodes)) == []
    assert "Warning" not in node_fields(nodes[0])
    assert ("Kernels" in node_fields(nodes[0])) == (speed is not None)


@pytest.mark.parametrize(("speed", "has_fault"), [(SOUND, False), (SLOW, True), (LESSER, True)])
def test_slow_kernels_are_a_fault(speed: KernelSpeed, has_fault: bool, site: Any) -> None:
    nodes = with_kernels(site, speed)
    found = diagnose(Facts(version="1.0", utc_s=0.0, site=Site(nodes, (), (), {})))
    expected = [(Fault.KERNELS_SLOW, node.name) for node in nodes] if has_fault else []
    assert [(finding.fault, finding.where) for finding in found] == expected
    assert bool(kernel_problem(speed)) == has_fault
