"""The gateway's counts of its requests and of their tokens. Nothing here runs for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from edgeshard.domain.requests.generation import Finished, Started
from edgeshard.metrics.exposition import Metrics, encoded


@dataclass(slots=True)
class TokenUsage:
    """The tokens of `per_prompt` answers to each prompt, in order; a prompt counts once."""

    per_prompt: int = 1
    new_tokens: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    def started(self, answer: int, event: Started) -> None:
        self._prompts[answer // self.per_prompt] = len(event.prompt_tokens)

    def finished(self, event: Finished) -> None:
        self.new_tokens += event.new_token_count

    def record(self) -> dict[str, int]:
        """The counts as OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
        }


FOR_ANY_KEY = frozenset(
    {
        *("edgeshard_build_info", "edgeshard_http_requests", "edgeshard_http_request_seconds"),
        *(
            "edgeshard_nodes",
            "edgeshard_deployments",
            "edgeshard_deployment_ready",
            "edgeshard_deployment_epoch",
        ),
        *("edgeshard_requests_limit", "edgeshard_requests_running", "edgeshard_requests_waiting"),
        *("edgeshard_requests", "edgeshard_requests_finished", "edgeshard_requests_failed"),
        *("edgeshard_requests_refused", "edgeshard_recoveries", "edgeshard_recovery_pause_seconds"),
        *("edgeshard_time_to_first_token_seconds", "edgeshard_request_seconds"),
        *(
            "edgeshard_request_queue_seconds",
            "edgeshard_request_prefill_seconds",
            "edgeshard_request_decode_seconds",
        ),
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success"),
        *("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"),
        *(
            "vllm:request_queue_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
        ),
    }
)
"""The metrics that any key for all models reads, without the sums of histograms. No other metric is
shown to it: if only one request runs, a count of tokens, of steps or of times between tokens is its
length."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class HttpMetrics:
    """The gateway's own counters, shown with the `site`'s, if the gateway has them."""

    def __init__(self, site: Metrics | None = None) -> None:
        registry = self._registry = CollectorRegistry()
        self._site = site
        self._requests = Counter(
            "edgeshard_http_requests",
            "HTTP requests that ended, by route and status; 499 is a client that left.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "edgeshard_http_request_seconds",
            "From an HTTP request's headers to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "edgeshard_http_tokens",
            "Tokens of requests over HTTP, by kind.",
            ("kind",),
            registry=registry,
        )

    def request_ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `status` is 0 if it got no answer."""
        method_label = method if method in ("GET", "POST", "HEAD", "DELETE") else "other"
        self._requests.labels(method_label, route, str(status or 499)).inc()
        self._seconds.labels(route).observe(seconds)

    def tokens_used(self, usage: TokenUsage) -> None:
        """Count the tokens of a request."""
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("generated").inc(usage.new_tokens)

    async def text(self, *, everything: bool) -> bytes:
        """The counters in Prometheus's text format: all of them, or those for any key."""
        families = [
            *self._registry.collect(),
            *(() if self._site is None else self._site.collected()),
        ]
        selected_families = families if everything else for_any_key(families)
        return (await asyncio.to_thread(encoded, selected_families))[0]


def for_any_key(families: Iterable[Metric]) -> list[Metric]:
    """The families that any key may read, histograms without their sums."""
    public_families = []
    for family in families:
        if family.name in FOR_ANY_KEY:
            coarse = Metric(family.name, family.documentation, family.type, family.unit)
            coarse.samples = [
                sample for sample in family.samples if sample.name != f"{family.name}_sum"
            ]
            public_families.append(coarse)
    return public_families
