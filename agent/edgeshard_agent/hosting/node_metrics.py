"""Metrics of a node's stages, links and cache, read at each scrape. docs/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from edgeshard import WIRE_VERSION, __version__
from edgeshard.metrics.families import EXPERTS, STREAMING, SWAP, Part, counter, gauge, histogram
from edgeshard.metrics.histogram import Histogram
from edgeshard_agent.engine.recording import StepCounts
from edgeshard_agent.hosting.host import Hosting
from edgeshard_agent.scheduler.scheduler import SchedulerStats
from edgeshard_agent.store.blob_cache import BlobCache

if TYPE_CHECKING:
    from edgeshard_agent.hosting.hosted_stage import HostedStage
    from edgeshard_agent.model.stage import StageModel

_STAGE = ("deployment", "stage")
_HOP = ("deployment", "from_stage", "to_stage")
_HEAD: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("prompt_tokens", "Positions of prompts that were run.", lambda stats: stats.prompt_tokens),
    (
        "prefix_hit_tokens",
        "Positions that the prefix cache had.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    ("guesses", "Draft tokens, each a row of a step.", lambda stats: stats.guesses),
    ("right_guesses", "Those that were drawn.", lambda stats: stats.right_guesses),
    ("preemptions", "Requests that were set back for memory.", lambda stats: stats.preemptions),
    ("swaps", "Requests set back whose KV was kept aside.", lambda stats: stats.swaps),
)
_STEPS: tuple[tuple[str, str, Callable[[StepCounts], Histogram]], ...] = (
    ("step", "What a step took to compute.", lambda counts: counts.steps),
    (
        "step_wait",
        "How long a step that had arrived waited for its turn.",
        lambda counts: counts.waits,
    ),
    (
        "step_bubble",
        "How long the stage idled before a step, because none was there.",
        lambda counts: counts.bubbles,
    ),
)


class AgentMetrics:
    """`collect` is called on the event loop's thread."""

    def __init__(self, hosting: Hosting, cache: BlobCache) -> None:
        self._hosting = hosting
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        versions = (__version__, str(WIRE_VERSION))
        meaning = "Always 1; the labels say which version runs."
        yield gauge("edgeshard_build_info", meaning, ("version", "wire_version"), [(versions, 1)])
        yield gauge(
            "edgeshard_cache_bytes",
            "Fetched weights on the disk.",
            (),
            [((), self._cache.used_bytes)],
        )
        yield gauge(
            "edgeshard_cache_limit_bytes",
            "What they may take.",
            (),
            [((), self._cache.limit_bytes)],
        )
        packed = self._cache.packed.used_bytes
        yield gauge("edgeshard_packed_bytes", "Packed units on the disk.", (), [((), packed)])
        stages = self._hosting.stages()
        yield from _steps(stages)
        yield from _tiers(stages)
        yield from _links(stages)
        silent = [((stage.prepare.deployment,), stage.coordinator_suspicions) for stage in stages]
        meaning = "Of this epoch's head: how often its coordinator was silent amid requests."
        samples = [(of, float(count)) for of, count in silent if count is not None]
        yield counter("edgeshard_coordinator_suspected", meaning, ("deployment",), samples)
        heads = [
            ((stage.prepare.deployment,), stage.head.stats)
            for stage in stages
            if stage.head is not None
        ]
        for name, meaning, figure in _HEAD:
            samples = [(of, figure(stats)) for of, stats in heads]
            yield counter(
                f"edgeshard_head_{name}",
                f"Of this epoch's head: {meaning}",
                ("deployment",),
                samples,
            )


def _steps(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    counts_by_stage = [
        ((stage.prepare.deployment, str(stage.prepare.stage)), stage.counts) for stage in stages
    ]
    for name, meaning, figure in _STEPS:
        yield histogram(
            f"edgeshard_{name}_seconds",
            meaning,
            _STAGE,
            [(of, figure(counts)) for of, counts in counts_by_stage],
        )


def _tiers(stages: Sequence[HostedStage]) -> Iterator[Metric]:
    """Metrics of stages whose weights, experts or KV are not all in memory."""
    yield from STREAMING.metrics(
        "edgeshard_weights", _STAGE, _parts(stages, lambda model: model.streaming)
    )
    yield from EXPERTS.metrics(
        "edgeshard_experts", _STAGE, _parts(stages, lambda model: model.experts)
    )
    yield from SWAP.metrics(
        "edgeshard_kv", _STAGE, _parts(stages, lambda model: model.pool.swapped)
    )


def _parts(
    stages: Iterable[HostedStage], part: Callable[[StageModel], Part | None]
) -> list[tuple[tuple[str, str], Part]]:
    return [
        ((stage.prepare.deployment, str(stage.prepare.stage)), component)
        for stage in stages
        if (component := part(stage.loaded.model)) is not None
    ]


def _links(stages: Iterable[HostedStage]) -> Iterator[Metric]:
    sent_bytes = []
    received = []
    suspected = []
    for stage in stages:
        sender = stage.sender
        if sender is None:
            continue
        index, count = stage.prepare.stage, len(stage.prepare.placement.stages)
        out = (stage.prepare.deployment, str(index), str((index + 1) % count))
        into = (stage.prepare.deployment, str((index - 1) % count), str(index))
        sent_bytes.append((out, float(sender.sent_bytes)))
        suspected.append((out, float(sender.suspicions)))
        received.append((into, float(stage.received_bytes)))
    yield counter(
        "edgeshard_link_sent_bytes", "Payload that went to the next stage.", _HOP, sent_bytes
    )
    yield counter(
        "edgeshard_link_received_bytes", "Payload that came from the stage before.", _HOP, received
    )
    yield counter(
        "edgeshard_link_suspected",
        "How often the link to the next stage became suspect.",
        _HOP,
        suspected,
    )
