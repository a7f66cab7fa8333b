"""A node's report of its huge pages, from the kernel's list of its mappings."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeshard_agent.measuring import machine_facts
from edgeshard_agent.measuring.machine_facts import AGAIN_S, HugePageWatch, read_huge_pages

from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import HugePages, StagePhase, StageStatus


def entry(rss_kb: int, huge_kb: int, flags: str) -> str:
    return (
        "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 \n"
        f"Size:              65536 kB\nRss:          {rss_kb:>10} kB\nAnonHugePages: {huge_kb:>9} "
        "kB\n"
        f"ShmemPmdMapped:        0 kB\nVmFlags: rd wr mr mw me ac sd {flags}\n"
    )


def test_only_mappings_that_ask_for_huge_pages_count(tmp_path: Path) -> None:
    maps = tmp_path / "smaps"
    maps.write_text(
        entry(3000, 2048, "hg")
        + entry(9000, 8192, "nh")
        + entry(7000, 4096, "")
        + entry(70, 0, "hg ")
    )
    assert read_huge_pages(maps) == HugePages(3070 << 10, 2048 << 10)


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert read_huge_pages(tmp_path / "smaps") is None


class Clock:
    time = 0.0

    def now(self) -> float:
        return self.time


def stage(phase: StagePhase) -> StageStatus:
    return StageStatus(DeploymentName("d"), Epoch(1), 0, LayerRange(0, 2), phase)


async def test_it_is_read_when_a_stage_comes_or_goes_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings: list[HugePages] = []

    def read() -> HugePages:
        readings.append(HugePages(len(readings), 0))
        return readings[-1]

    monkeypatch.setattr(machine_facts, "read_huge_pages", read)
    clock = Clock()
    watch = HugePageWatch(clock)
    for seconds, stages, count in (
        (0.0, (), 1),
        (1.0, (), 1),
        (2.0, (stage(StagePhase.LOADING),), 2),
        (3.0, (stage(StagePhase.ACTIVE),), 3),
        (AGAIN_S, (stage(StagePhase.ACTIVE),), 3),
        (3.0 + AGAIN_S, (stage(StagePhase.ACTIVE),), 4),
        (4.0 + AGAIN_S, (), 5),
    ):
        clock.time = seconds
        assert await watch.read(stages) == readings[-1]
        assert len(readings) == count, seconds
