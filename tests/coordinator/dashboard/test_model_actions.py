"""The fitting size: the largest of several that can be placed, and the reason if none can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from edgeshard_coordinator.dashboard.operator_actions import CONTEXTS, fits, fitting_specs

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import NotFoundError, PlacementError, ResourceExhaustedError

PLACED = Placement(stages=(), kv_block_tokens=16, kv_blocks=1, micro_batch=1, micro_batches=1)


class Site:
    """A site with room for the KV of `tokens` tokens."""

    def __init__(self, tokens: int, max_context: int = 65_536) -> None:
        self.tokens = tokens
        self.max_context = max_context
        self.planned: list[DeploymentSpec] = []

    async def stored_model(self, name: str) -> Any:
        if name != "m":
            raise NotFoundError("unknown", field="model")
        return SimpleNamespace(max_context=self.max_context)

    async def plan(self, spec: DeploymentSpec) -> Placement:
        self.planned.append(spec)
        needed = spec.max_context * spec.concurrency
        if needed > self.tokens:
            error = ResourceExhaustedError if len(self.planned) % 2 else PlacementError
            raise error(f"{needed} tokens do not fit: add a node")
        return PLACED


async def asked(site: Any, name: str = "m") -> Any:
    return await fits(site, {"name": name})


@pytest.mark.parametrize(
    ("tokens", "context", "concurrency"),
    [
        (10**9, 65_536, 8),
        (100_000, 65_536, 1),
        (40_000, 32_768, 1),
        (8_192, 8_192, 1),
        (2_048, 2_048, 1),
    ],
)
async def test_the_largest_size_that_can_be_placed(
    tokens: int, context: int, concurrency: int
) -> None:
    site = Site(tokens)
    found = await asked(site)
    assert (found["context"], found["concurrency"]) == (context, concurrency)
    assert site.planned[-1].max_context == context, "nothing smaller is planned"


async def test_the_reason_is_that_of_the_smallest() -> None:
    with pytest.raises(
        (PlacementError, ResourceExhaustedError), match="2048 tokens do not fit: add a node"
    ):
        await asked(Site(100))


async def test_another_error_is_not_a_lack_of_room() -> None:
    with pytest.raises(NotFoundError):
        await asked(Site(100), "other")


def test_no_context_is_longer_than_the_model_s() -> None:
    specs = fitting_specs("m", 4_096)
    assert [(spec.max_context, spec.concurrency) for spec in specs] == [
        (4_096, 8),
        (4_096, 1),
        (2_048, 1),
    ]
    assert len(fitting_specs("m", 10**6)) == 2 + len(CONTEXTS)
    assert [spec.max_context for spec in fitting_specs("m", 128)] == [128, 128]
