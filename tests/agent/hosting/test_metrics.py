"""What an agent's metrics say of weights that are streamed, and of packed units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from edgeshard_agent.engine.recording import StepCounts
from edgeshard_agent.hosting.metrics import AgentMetrics

from edgeshard.domain.device import StageStreaming


def stage(index: int, streaming: StageStreaming | None) -> Any:
    model = SimpleNamespace(streaming=streaming)
    prepare = SimpleNamespace(deployment="tales", stage=index)
    return SimpleNamespace(
        prepare=prepare, loaded=SimpleNamespace(model=model), counts=StepCounts(), sender=None, head=None
    )


def test_weights_that_are_streamed_are_told_of_the_stages_that_stream() -> None:
    stages = [stage(0, None), stage(1, StageStreaming(10, 90, 900, 1.5))]
    cache = SimpleNamespace(used_bytes=1, limit_bytes=2, packed=SimpleNamespace(used_bytes=300))
    hosting = SimpleNamespace(stages=lambda: stages)
    metrics = AgentMetrics(cast(Any, hosting), cast(Any, cache)).collect()
    samples = [sample for metric in metrics for sample in metric.samples]
    labels = {"deployment": "tales", "stage": "1"}
    told = {s.name: (s.labels, s.value) for s in samples if "weights" in s.name or "packed" in s.name}
    assert told == {
        "edgeshard_packed_bytes": ({}, 300),
        "edgeshard_weights_resident_bytes": (labels, 10),
        "edgeshard_weights_streamed_bytes": (labels, 90),
        "edgeshard_weights_read_bytes_total": (labels, 900),
        "edgeshard_weights_wait_seconds_total": (labels, 1.5),
    }
