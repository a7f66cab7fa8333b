"""Profiles, links and placements across the wire: measured values arrive, impossible ones are
refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgeshard.domain.control.commands import (
    CommandProgress,
    MeasureCompute,
    Peer,
    ProbeLinks,
    ProfileReport,
)
from edgeshard.domain.deployments.placement import PlacedStage, Placement, Prediction
from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import NodeId, NodeName, OperationId
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    DiskProfile,
    Effort,
    EnergyProfile,
    LayerKind,
    LayerProfile,
    LinkProfile,
    MeasuredLink,
    MemoryProfile,
    Sample,
    StepOverhead,
)
from edgeshard.wire.control import (
    agent_message_from_wire,
    agent_message_to_wire,
    command_from_wire,
    command_to_wire,
    report_from_wire,
    report_to_wire,
)
from edgeshard.wire.site import placement_from_wire, placement_to_wire

BLOCK = LayerProfile(
    LayerKind.BLOCK,
    1000,
    12,
    0,
    1 << 20,
    (Sample(64, 0, 0.01, 0.02, 5),),
    (Sample(1, 128, 0.001, 0.01, 9),),
)
PROFILE = ComputeProfile(
    fingerprint="f" * 16,
    model_hash="m" * 16,
    dtype=DType.BFLOAT16,
    device="cpu",
    threads=2,
    layers=(BLOCK,),
    overhead=StepOverhead(1e-4, 1e-9, 0.1),
    memory=MemoryProfile(8 << 30, 6 << 30, 200 << 20, unified=True),
    effort=Effort.QUICK,
    processor_share=0.9,
    energy=EnergyProfile(3.5, 11.0, "ina3221"),
    disk=DiskProfile(2.1e9, 300 << 30, 0.9e9),
)
LINK = MeasuredLink(NodeId("id-a"), NodeId("id-b"), LinkProfile(0.002, 1e8, 0.05, 30, 4 << 20))
REPORT = ProfileReport(
    NodeId("id-a"),
    None,
    (PROFILE, replace(PROFILE, energy=None, disk=None, quantisation=Quantisation.INT4)),
    (LINK,),
)


def test_a_report_arrives_as_it_was_made() -> None:
    assert report_from_wire(report_to_wire(REPORT)) == REPORT


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (
            replace(LINK, profile=replace(LINK.profile, bandwidth_bps=0.0)),
            "links.profile.bandwidth_bps",
        ),
        (
            replace(LINK, profile=replace(LINK.profile, bandwidth_bps=-1.0)),
            "links.profile.bandwidth_bps",
        ),
        (
            replace(LINK, profile=replace(LINK.profile, latency_s=math.nan)),
            "links.profile.latency_s",
        ),
        (replace(LINK, profile=replace(LINK.profile, samples=1)), "links.profile.samples"),
        (replace(LINK, sender=NodeId("id-c")), "links"),
        (replace(LINK, receiver=NodeId("id-a")), "links"),
    ],
)
def test_a_link_that_cannot_be_is_refused(wrong: MeasuredLink, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        report_from_wire(report_to_wire(replace(REPORT, links=(wrong,))))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (replace(PROFILE, layers=()), "compute.layers"),
        (replace(PROFILE, threads=0), "compute.threads"),
        (replace(PROFILE, layers=(replace(BLOCK, layers=0),)), "compute.layers.layers"),
        (
            replace(PROFILE, layers=(replace(BLOCK, decode=(Sample(1, 0, 0.0),)),)),
            "compute.layers.decode.seconds",
        ),
        (
            replace(PROFILE, layers=(replace(BLOCK, decode=(Sample(1, 0, math.inf),)),)),
            "compute.layers.decode.seconds",
        ),
        (replace(PROFILE, overhead=StepOverhead(-1.0)), "compute.overhead.seconds"),
        (replace(PROFILE, disk=DiskProfile(0.0, 1)), "compute.disk.read_bytes_per_s"),
        (replace(PROFILE, disk=DiskProfile(1.0, 1, -1.0)), "compute.disk.write_bytes_per_s"),
        (replace(PROFILE, energy=EnergyProfile(math.nan, 1.0, "nvml")), "compute.energy.idle_w"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(wrong: ComputeProfile, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        report_from_wire(report_to_wire(replace(REPORT, compute=(wrong,))))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "command",
    [
        MeasureCompute(
            {"hidden_size": 64, "nested": {"a": [1, 2]}},
            DType.FLOAT32,
            effort=Effort.QUICK,
            again=False,
        ),
        MeasureCompute(
            {}, DType.BFLOAT16, effort=Effort.FULL, again=True, quantisation=Quantisation.INT8
        ),
        ProbeLinks((Peer(NodeId("id-b"), NodeName("b"), "127.0.0.1:7001"),)),
        ProbeLinks(()),
    ],
)
def test_a_command_to_measure_arrives(command: MeasureCompute | ProbeLinks) -> None:
    assert command_from_wire(command_to_wire(OperationId("op"), command)) == (
        OperationId("op"),
        command,
    )


def test_a_quantisation_this_version_does_not_know_is_refused() -> None:
    message = report_to_wire(REPORT)
    message.compute[0].quantisation = "int3"
    with pytest.raises(InvalidArgumentError) as caught:
        report_from_wire(message)
    assert caught.value.field == "compute.quantisation" and "int8, int4" in caught.value.message


def test_progress_arrives() -> None:
    progress = CommandProgress(OperationId("op"), 3, 8, "block, decode")
    assert agent_message_from_wire(agent_message_to_wire(progress)) == progress


@pytest.mark.parametrize("gap", [None, 0.0, 0.03])
def test_a_placement_arrives_with_what_is_expected_of_it(gap: float | None) -> None:
    stage = PlacedStage(0, NodeId("id-a"), NodeName("a"), "a:1", LayerRange(0, 4), 10, 20, 30)
    cost = StageCost((1, 8), (0.1, 0.2), (0.1, 0.3), 1e-9, 2e-9, 0.001, 0.0, 1e-5)
    predicted = Prediction(0.5, 0.05, 20.0, "compute of a", gap)
    placement = Placement((stage,), 16, 4, 1, 1, predicted, "from measurements", (cost,))
    assert placement_from_wire(placement_to_wire(placement)) == placement
    assert (
        placement_from_wire(placement_to_wire(replace(placement, predicted=None))).predicted is None
    )
