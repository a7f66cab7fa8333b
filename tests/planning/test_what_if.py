"""What-if on a site: a node like a measured one has its speed, a new one has the site's median
link."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.inputs.catalogue import CATALOGUE
from edgeshard.planning.inputs.devices import (
    Cluster,
    ClusterNode,
    Link,
    parse_cluster,
    with_bandwidth,
)
from edgeshard.planning.inputs.problem import PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec, built_in_model
from edgeshard.planning.inputs.what_if import changed, typical_link

LINKS = {
    ("a", "b"): Link(10e6, 0.001),
    ("b", "a"): Link(20e6, 0.003),
    ("b", "c"): Link(90e6, 0.002),
}


class Times:
    """Times of a measured node."""

    def block_s(self, block: BlockSpec, phase: StepShape) -> float:
        return 1.0

    def embedding_s(self, phase: StepShape) -> float:
        return 0.0

    def head_s(self, phase: StepShape) -> float:
        return 0.0

    def step_s(self, hidden_bytes: float) -> float:
        return 0.0


@pytest.fixture
def problem() -> PlanProblem:
    """Three nodes; a and b were measured, and only the links of LINKS were."""
    model = built_in_model("llama2-7b")
    assert model is not None
    nodes = tuple(ClusterNode(name, CATALOGUE["orin-nx"], name) for name in "abc")
    cluster = Cluster(nodes, Link(0.0), "a", MappingProxyType(LINKS))
    return PlanProblem(model, cluster, times={"a": Times(), "b": Times()})


def link(problem: PlanProblem, sender: str, receiver: str) -> Link:
    nodes = {node.name: node for node in problem.cluster.nodes}
    return problem.cluster.link(nodes[sender], nodes[receiver])


def test_disks_and_memory_are_changed_by_node_and_for_all(problem: PlanProblem) -> None:
    after = changed(problem, ["disk=800MB/s", "b disk=2.1GB/s", "c memory=+8GB"])
    assert [node.device.disk_bytes_per_s for node in after.cluster.nodes] == [0.8e9, 2.1e9, 0.8e9]
    more = [
        node.device.memory_bytes - CATALOGUE["orin-nx"].memory_bytes for node in after.cluster.nodes
    ]
    assert more == [0, 0, 8e9]
    for wrong in ("disk=fast", "memory=8GB", "nobody disk=1GB/s", "disk=", "b disk=1GB/s x"):
        with pytest.raises(InvalidArgumentError) as caught:
            changed(problem, [wrong])
        assert caught.value.field == "what_if", wrong


def test_a_node_like_a_measured_one_takes_its_times(problem: PlanProblem) -> None:
    more = changed(problem, ["+2 b", "+1 c"])
    assert more.cluster.names == ("a", "b", "c", "b-new-1", "b-new-2", "c-new-1")
    assert more.times["b-new-1"] is more.times["b-new-2"] is problem.times["b"]
    assert "c-new-1" not in more.times, "c is planned from its figures, and so is one like it"
    assert set(problem.times) == {"a", "b"}


def test_a_new_node_has_the_sites_median_link_and_nothing_else_changes(
    problem: PlanProblem,
) -> None:
    more = changed(problem, ["+1 h100", "+1 h200"])
    median = Link(20e6, 0.002)
    assert link(more, "a", "h100-new-1") == link(more, "h200-new-1", "c") == median
    assert link(more, "h100-new-1", "h200-new-1") == median
    for pair in (("a", "b"), ("b", "a"), ("b", "c")):
        assert link(more, *pair) == LINKS[pair]
    assert link(more, "a", "c").bandwidth_bps == 0, (
        "nobody measured it, and a new node does not make it"
    )


def test_a_site_without_links_gives_new_nodes_a_gigabit(problem: PlanProblem) -> None:
    assert typical_link(Cluster(problem.cluster.nodes[:1], Link(0.0), "a")) == Link(1e9)


def test_a_sweep_makes_no_link_where_there_is_none(problem: PlanProblem) -> None:
    swept = with_bandwidth(problem.cluster, 5e6, None)
    a, b, c = swept.nodes
    assert swept.link(a, b) == Link(5e6, 0.001)
    assert swept.link(a, c).bandwidth_bps == 0
    assert with_bandwidth(problem.cluster, 5e6, ("a", "c")).link(a, c).bandwidth_bps == 5e6, (
        "asked for by name"
    )


def test_a_node_like_one_of_a_file_has_its_links_and_caps() -> None:
    figures = {"memory_bytes": 8e9, "bandwidth_bytes_per_s": 50e9, "flops": 1e12}
    cluster = parse_cluster(
        {
            "source": "a",
            "device": [
                {"name": "a", **figures},
                {"name": "jetson", "count": 2, "up_bps": 20e6, **figures},
            ],
            "link": [
                {"bandwidth_bps": 100e6},
                {"from": "a", "to": "jetson", "bandwidth_bps": 10e6},
                {"between": ["jetson", "jetson"], "bandwidth_bps": 5e6},
            ],
        }
    )
    model = built_in_model("llama2-7b")
    assert model is not None
    more = changed(PlanProblem(model, cluster), ["+2 jetson"])
    assert link(more, "a", "jetson-new-1").bandwidth_bps == 10e6
    assert link(more, "jetson-new-2", "a").bandwidth_bps == 20e6, "its uplink is as slow"
    for ends in (
        ("jetson-new-1", "jetson-new-2"),
        ("jetson-1", "jetson-new-1"),
        ("jetson-new-1", "jetson-2"),
    ):
        assert link(more, *ends).bandwidth_bps == 5e6


def test_what_was_asked_of_a_node_goes_with_it(problem: PlanProblem) -> None:
    asked = replace(problem, exclude=("c",), reserve={"b": 1e9, "c": 2e9}, max_share={"c": 0.5})
    left = changed(asked, ["-c"])
    left.check()
    assert (left.exclude, left.reserve, left.max_share) == ((), {"b": 1e9}, {})
