"""A daemon's one registry, and its text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import exposition as formats
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Collect = Callable[[], Iterable[Metric]]
"""Reads the state of a part of the daemon. Called from the event loop's thread at each scrape, and
never between."""


def choose_encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """The writer and the content type of the format that an Accept header wants.

    The library cannot compare a version that is not of numbers: such a header gets the plain
    format.
    """
    try:
        return formats.choose_encoder(accept)
    except (TypeError, ValueError):
        return formats.choose_encoder("")


class _Reading(Collector):
    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class Metrics:
    """A daemon's figures. Nothing is counted here: a scrape reads the counts that its parts
    keep."""

    def __init__(self, *collects: Collect) -> None:
        # Without their names beforehand: that would be a scrape of a daemon that has not started.
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        for collect in collects:
            self._registry.register(_Reading(collect))

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type, in the format that a scraper's Accept header requests."""
        return encoded(self.collected(), accept)

    async def exposed(self, accept: str = "") -> tuple[bytes, str]:
        """The same, read on the event loop, where the state is, and written in a thread, which
        takes longer."""
        return await asyncio.to_thread(encoded, self.collected(), accept)

    def collected(self) -> list[Metric]:
        """All figures as they are now."""
        return list(self._registry.collect())


def encoded(families: list[Metric], accept: str = "") -> tuple[bytes, str]:
    """The text of these figures and its content type, as from `Metrics.exposition`."""
    encode, content_type = choose_encoder(accept)
    return encode(_Reading(lambda: families)), content_type
