"""The gateway's counts of its requests. Nothing here runs for each token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from edgeshard.gateway.usage import Usage
from edgeshard.metrics.exposition import Metrics

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class HttpMetrics:
    """The gateway's own counters, shown beside those of the `site`, where the gateway has them."""

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
            "edgeshard_http_tokens", "Tokens of requests over HTTP, by kind.", ("kind",), registry=registry
        )

    def request_ended(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `status` is 0 where it got no answer."""
        known = method if method in ("GET", "POST", "HEAD", "DELETE") else "other"
        self._requests.labels(known, route, str(status or 499)).inc()
        self._seconds.labels(route).observe(seconds)

    def tokens_used(self, usage: Usage) -> None:
        """Count the tokens of a request."""
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("generated").inc(usage.new_tokens)

    async def text(self) -> bytes:
        """All counters in Prometheus's text format."""
        own = generate_latest(self._registry)
        return own if self._site is None else own + (await self._site.exposed())[0]
