"""What a box knows of its stages, links and cache, as metrics: read at each scrape. docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from edgeshard import WIRE_VERSION, __version__
from edgeshard.domain.device import StageStreaming, StageSwap
from edgeshard.metrics.experts import expert_metrics
from edgeshard.metrics.families import counter, gauge, histogram
from edgeshard_agent.hosting.host import Hosting
from edgeshard_agent.scheduler.scheduler import SchedulerStats
from edgeshard_agent.store.cache import BlobCache

if TYPE_CHECKING:
    from edgeshard_agent.hosting.hosted_stage import HostedStage

_STAGE = ("deployment", "stage")
_HOP = ("deployment", "from_stage", "to_stage")
_HEAD: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("prompt_tokens", "Positions of prompts that were run.", lambda stats: stats.prompt_tokens),
    ("prefix_hit_tokens", "Positions that the prefix cache had.", lambda stats: stats.prefix_hit_tokens),
    ("preemptions", "Requests that were set back for memory.", lambda stats: stats.preemptions),
    ("swaps", "Requests set back whose KV was kept aside.", lambda stats: stats.swaps),
)
_Streamed = tuple[tuple[str, str, Callable[[StageStreaming], float]], ...]
_STREAMING_GAUGES: _Streamed = (
    ("resident_bytes", "Weights of a streaming stage that stay in memory.", lambda found: found.resident_bytes),
    ("streamed_bytes", "Weights that each sweep reads from the disk.", lambda found: found.streamed_bytes),
)
_STREAMING_COUNTERS: _Streamed = (
    ("read_bytes", "Weights that were read from the disk.", lambda found: found.read_bytes),
    ("wait_seconds", "How long steps waited for weights.", lambda found: found.waited_s),
)
_Swapped = tuple[tuple[str, str, Callable[[StageSwap], float]], ...]
_SWAP_GAUGES: _Swapped = (
    ("capacity_bytes", "KV that a stage may keep aside.", lambda found: found.capacity_bytes),
    ("kept_bytes", "KV that it keeps aside now.", lambda found: found.kept_bytes),
)
_SWAP_COUNTERS: _Swapped = (
    ("out", "Requests whose KV was put aside.", lambda found: found.swapped_out),
    ("in", "Requests whose KV came back.", lambda found: found.swapped_in),
)


class AgentMetrics:
    """`collect` is called on the event loop's thread."""

    def __init__(self, hosting: Hosting, cache: BlobCache) -> None:
        self._hosting = hosting
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        yield gauge(
            "edgeshard_build_info",
            "Always 1; the labels say which version runs.",
            ("version", "wire_version"),
            [((__version__, str(WIRE_VERSION)), 1)],
        )
        yield gauge("edgeshard_cache_bytes", "Fetched weights on the disk.", (), [((), self._cache.used_bytes)])
        yield gauge("edgeshard_cache_limit_bytes", "What they may take.", (), [((), self._cache.limit_bytes)])
        packed = self._cache.packed.used_bytes
        yield gauge("edgeshard_packed_bytes", "Packed units on the disk.", (), [((), packed)])
        stages = self._hosting.stages()
        yield from _steps(stages)
        yield from _weights(stages)
        yield from _experts(stages)
        yield from _swaps(stages)
        yield from _links(stages)
        heads = [((stage.prepare.deployment,), stage.head.stats) for stage in stages if stage.head is not None]
        for name, meaning, figure in _HEAD:
            samples = [(of, figure(stats)) for of, stats in heads]
            yield counter(f"edgeshard_head_{name}", f"Of this epoch's head: {meaning}", ("deployment",), samples)


def _steps(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    held = [((stage.prepare.deployment, str(stage.prepare.stage)), stage.counts) for stage in stages]
    yield histogram(
        "edgeshard_step_seconds", "What a step took to compute.", _STAGE, [(of, counts.steps) for of, counts in held]
    )
    yield histogram(
        "edgeshard_step_wait_seconds",
        "How long a step that had arrived waited for its turn.",
        _STAGE,
        [(of, counts.waits) for of, counts in held],
    )
    yield histogram(
        "edgeshard_step_bubble_seconds",
        "How long the stage idled before a step, because none was there.",
        _STAGE,
        [(of, counts.bubbles) for of, counts in held],
    )


def _weights(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    """Of stages that stream layers; no others have them."""
    told = [
        ((stage.prepare.deployment, str(stage.prepare.stage)), streaming)
        for stage in stages
        if (streaming := stage.loaded.model.streaming) is not None
    ]
    for name, meaning, figure in _STREAMING_GAUGES:
        yield gauge(f"edgeshard_weights_{name}", meaning, _STAGE, [(of, figure(found)) for of, found in told])
    for name, meaning, figure in _STREAMING_COUNTERS:
        yield counter(f"edgeshard_weights_{name}", meaning, _STAGE, [(of, figure(found)) for of, found in told])


def _experts(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    """Of stages with experts on their disk."""
    told = [
        ((stage.prepare.deployment, str(stage.prepare.stage)), experts)
        for stage in stages
        if (experts := stage.loaded.model.experts) is not None
    ]
    yield from expert_metrics("edgeshard_experts", _STAGE, told)


def _swaps(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    """Of stages that may keep KV aside; no others have them."""
    told = [
        ((stage.prepare.deployment, str(stage.prepare.stage)), swapped)
        for stage in stages
        if (swapped := stage.loaded.model.pool.swapped) is not None
    ]
    for name, meaning, figure in _SWAP_GAUGES:
        yield gauge(f"edgeshard_kv_swap_{name}", meaning, _STAGE, [(of, figure(found)) for of, found in told])
    for name, meaning, figure in _SWAP_COUNTERS:
        yield counter(f"edgeshard_kv_swaps_{name}", meaning, _STAGE, [(of, figure(found)) for of, found in told])


def _links(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    sent, received, suspected = [], [], []
    for stage in stages:
        sender = stage.sender
        if sender is None:
            continue
        index, count = stage.prepare.stage, len(stage.prepare.placement.stages)
        out = (stage.prepare.deployment, str(index), str((index + 1) % count))
        into = (stage.prepare.deployment, str((index - 1) % count), str(index))
        sent.append((out, float(sender.sent_bytes)))
        suspected.append((out, float(sender.suspicions)))
        received.append((into, float(stage.received_bytes)))
    yield counter("edgeshard_link_sent_bytes", "Payload that went to the next stage.", _HOP, sent)
    yield counter("edgeshard_link_received_bytes", "Payload that came from the stage before.", _HOP, received)
    yield counter("edgeshard_link_suspected", "How often the link to the next stage became suspect.", _HOP, suspected)
