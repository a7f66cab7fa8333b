"""The weights a node holds on disk: a content-addressed cache, and fetching what it lacks from the coordinator."""

from __future__ import annotations

from edgeshard_agent.store.cache import BlobCache, Pin
from edgeshard_agent.store.fetcher import Fetcher, Progress

__all__ = ["BlobCache", "Fetcher", "Pin", "Progress"]
