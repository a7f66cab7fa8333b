"""The number of requests of a deployment that run at once. Pure."""

from __future__ import annotations

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement

DEFAULT_TOKENS = 128
"""Tokens of a typical prompt and of a typical answer if nothing is known of either."""
OVERCOMMIT = 2
"""Requests that may run for each one whose longest text has memory, if a deployment overcommits."""
MAX_SHORT_REQUESTS = 8
"""Requests of typical length that may run in a KV pool for fewer of the longest, if they fit."""


def typical_lengths(spec: DeploymentSpec, placement: Placement) -> tuple[int, int]:
    """Tokens of a typical prompt and answer: the plan's, else the spec's, else the defaults."""
    lengths = placement.predicted or spec
    return lengths.prompt_tokens or DEFAULT_TOKENS, lengths.new_tokens or DEFAULT_TOKENS


def running_requests(spec: DeploymentSpec, placement: Placement) -> int:
    """The most requests that run at once: those whose longest text has memory, or more that are short."""
    longest = spec.concurrency * (OVERCOMMIT if spec.kv_overcommit else 1)
    pool_tokens = placement.kv_blocks * placement.kv_block_tokens
    short = pool_tokens // sum(typical_lengths(spec, placement))
    return max(longest, min(MAX_SHORT_REQUESTS, short))
