"""An agent's metrics of streamed weights, of packed units, and of swapped KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from edgeshard_agent.engine.recording import StepCounts
from edgeshard_agent.hosting.node_metrics import AgentMetrics

from edgeshard.domain.nodes.device import StageExperts, StageStreaming, StageSwap


def stage(
    index: int,
    streaming: StageStreaming | None,
    experts: StageExperts | None = None,
    swapped: StageSwap | None = None,
) -> Any:
    model = SimpleNamespace(
        streaming=streaming, experts=experts, pool=SimpleNamespace(swapped=swapped)
    )
    prepare = SimpleNamespace(deployment="tales", stage=index)
    return SimpleNamespace(
        prepare=prepare,
        loaded=SimpleNamespace(model=model),
        counts=StepCounts(),
        sender=None,
        head=None,
        coordinator_suspicions=3 if index == 0 else None,
    )


def test_weights_that_are_streamed_are_told_of_the_stages_that_stream() -> None:
    told = told_of(
        [stage(0, None), stage(1, StageStreaming(10, 90, 900, 1.5))], "weights", "packed", "experts"
    )
    labels = {"deployment": "tales", "stage": "1"}
    assert told == {
        "edgeshard_packed_bytes": ({}, 300),
        "edgeshard_weights_resident_bytes": (labels, 10),
        "edgeshard_weights_streamed_bytes": (labels, 90),
        "edgeshard_weights_read_bytes_total": (labels, 900),
        "edgeshard_weights_wait_seconds_total": (labels, 1.5),
    }


def test_experts_on_the_disk_are_told_of_the_stages_that_cache_them() -> None:
    experts = StageExperts(
        20, room_bytes=30, total_bytes=90, hits=7, misses=3, read_bytes=60, waited_s=0.5
    )
    told = told_of([stage(0, None), stage(1, None, experts)], "experts")
    labels = {"deployment": "tales", "stage": "1"}
    assert told == {
        "edgeshard_experts_cached_bytes": (labels, 20),
        "edgeshard_experts_room_bytes": (labels, 30),
        "edgeshard_experts_size_bytes": (labels, 90),
        "edgeshard_experts_hits_total": (labels, 7),
        "edgeshard_experts_misses_total": (labels, 3),
        "edgeshard_experts_read_bytes_total": (labels, 60),
        "edgeshard_experts_wait_seconds_total": (labels, 0.5),
    }


def told_of(stages: list[Any], *words: str) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and figure of each metric whose name has one of the words; each has one sample at
    most."""
    cache = SimpleNamespace(used_bytes=1, limit_bytes=2, packed=SimpleNamespace(used_bytes=300))
    hosting = SimpleNamespace(stages=lambda: stages)
    metrics = AgentMetrics(cast(Any, hosting), cast(Any, cache)).collect()
    samples = [sample for metric in metrics for sample in metric.samples]
    return {s.name: (s.labels, s.value) for s in samples if any(word in s.name for word in words)}


def test_how_often_its_coordinator_was_silent_is_told_of_the_stage_with_the_head() -> None:
    told = told_of([stage(0, None), stage(1, None)], "coordinator_suspected_total")
    assert told == {"edgeshard_coordinator_suspected_total": ({"deployment": "tales"}, 3)}


def test_kv_kept_aside_is_told_of_the_stages_that_may_keep_some() -> None:
    labels = {"deployment": "tales", "stage": "1"}
    assert told_of(
        [stage(0, None), stage(1, None, swapped=StageSwap(4096, 1024, 3, 2))], "kv_swap"
    ) == {
        "edgeshard_kv_swap_capacity_bytes": (labels, 4096),
        "edgeshard_kv_swap_kept_bytes": (labels, 1024),
        "edgeshard_kv_swaps_out_total": (labels, 3),
        "edgeshard_kv_swaps_in_total": (labels, 2),
    }
