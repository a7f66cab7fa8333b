"""The view of an API key's holder of a site."""

from __future__ import annotations

import json

from edgeshard_coordinator.control.requests.request_meter import KeyCounts
from edgeshard_coordinator.core.values.quotas import Quota
from edgeshard_coordinator.core.values.state import DeploymentRecord
from edgeshard_coordinator.dashboard.applications import application_picture

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import Digest, Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange


def record(name: str, model: str) -> DeploymentRecord:
    spec = parse_spec({"name": name, "model": model})
    stage = PlacedStage(
        0, NodeId("id-attic"), NodeName("attic"), "attic:7000", LayerRange(0, 6), 1000, 1000
    )
    failure = UnavailableError("node attic is away")
    placement = Placement((stage,), 16, 8, 1, 1)
    return DeploymentRecord(
        "u1", spec, Digest("d" * 64), placement, Epoch(1), DeploymentPhase.FAILED, failure=failure
    )


TALES, POEMS = record("tales", "fairy"), record("poems", "verse")


def test_deployments_are_those_that_the_key_may_use() -> None:
    for models, expected in (
        (None, {"tales", "poems"}),
        (frozenset({"tales"}), {"tales"}),
        (frozenset({"verse", "gone"}), {"poems"}),
        (frozenset({"gone"}), set()),
    ):
        picture = application_picture(models, (TALES, POEMS), KeyCounts(), 0, Quota())
        assert set(picture["deployments"]) == expected
        assert all(set(one) == {"model", "phase"} for one in picture["deployments"].values())
        assert "attic" not in json.dumps(picture)


def test_limits_that_a_key_has_not_are_left_out() -> None:
    used = KeyCounts(3, 20, 40)
    counts = {"requests": 3, "running": 1, "prompt_tokens": 20, "new_tokens": 40}
    assert application_picture(None, (), used, 1, Quota())["usage"] == counts
    limited = application_picture(None, (), used, 1, Quota(2, 1000))["usage"]
    assert limited == counts | {"requests_at_once": 2, "tokens_per_minute": 1000}
