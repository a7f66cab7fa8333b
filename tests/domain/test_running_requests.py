"""The number of concurrent requests of a deployment: as many as have memory at their longest, or
more that are short.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgeshard.domain.deployments.deployment import MAX_SHORT_REQUESTS, parse_spec, running_requests
from edgeshard.domain.deployments.placement import Placement, Prediction

TWO_CONTEXTS = Placement(
    (), kv_block_tokens=16, kv_blocks=2 * 2048 // 16, micro_batch=1, micro_batches=1
)


@pytest.mark.parametrize(
    ("options", "running"),
    [
        ({"concurrency": 2}, MAX_SHORT_REQUESTS),
        ({"concurrency": 2, "prompt_tokens": 900, "new_tokens": 100}, 4),
        ({"concurrency": 2, "new_tokens": 4000}, 2),
        ({"concurrency": 12}, 12),
        ({"concurrency": 12, "kv_overcommit": True}, 24),
    ],
)
def test_short_requests_run_instead_of_few_long_ones(options: dict[str, int], running: int) -> None:
    spec = parse_spec({"name": "tale", "model": "m", **options})
    assert running_requests(spec, TWO_CONTEXTS) == running


def test_the_lengths_of_a_plan_count_before_those_of_the_spec() -> None:
    spec = parse_spec({"name": "tale", "model": "m", "concurrency": 1})
    planned = replace(
        TWO_CONTEXTS, predicted=Prediction(1.0, 1.0, 1.0, "a", prompt_tokens=1000, new_tokens=24)
    )
    assert running_requests(spec, planned) == 4
