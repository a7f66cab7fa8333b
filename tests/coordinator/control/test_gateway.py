"""What the gateway asks of the coordinator, where no site is needed to tell."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from edgeshard_coordinator.control.gateway import SiteBackend
from edgeshard_coordinator.control.requests import RequestFront
from edgeshard_coordinator.control.traffic import TrafficBook
from edgeshard_coordinator.core.state import DeploymentRecord, State

from edgeshard.domain.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.errors import DeniedError, NotFoundError
from edgeshard.domain.generation import Token
from edgeshard.domain.ids import Digest, Epoch, NodeId, NodeName
from edgeshard.domain.model import LayerRange
from edgeshard.domain.placement import PlacedStage, Placement
from edgeshard.gateway.callers import Caller


def record(name: str, model: str, phase: DeploymentPhase = DeploymentPhase.READY) -> DeploymentRecord:
    spec = parse_spec({"name": name, "model": model, "source": "a", "max_context": 64})
    stage = PlacedStage(0, NodeId("id-a"), NodeName("a"), "a:7000", LayerRange(0, 6), 1000, 1000)
    placement = Placement((stage,), 16, 8, 1, 1)
    return DeploymentRecord("u", spec, Digest("d" * 64), placement, Epoch(1), phase)


class Front:
    """Two deployments of one model."""

    def __init__(self) -> None:
        self.served = {name: SimpleNamespace(name=name, manifest_digest="d" * 64) for name in ("one", "two")}

    def records(self) -> tuple[Any, ...]:
        return tuple(self.served.values())

    def find(self, model: str) -> Any:
        if model not in self.served:
            raise NotFoundError("gone", field="model")
        return self.served[model]


async def test_texts_of_tokens_outlive_another_deployment_of_the_model() -> None:
    front: Any = Front()

    async def texts(model: str, tokens: Sequence[int]) -> list[str]:
        front.find(model)
        return [f"t{token}" for token in tokens]

    chats: Any = SimpleNamespace(prompt=None, tokenize=None, detokenize=None, texts=texts)
    backend = SiteBackend(front, SimpleNamespace(), chats)
    await backend.words("one").learn(Token(0, 5, ""))
    words = backend.words("two")
    del front.served["one"]
    await words.learn(Token(0, 6, ""))
    assert words.text(6) == "t6" and backend.words("two") is words


@pytest.mark.parametrize("asked", ["nothing", "hidden", "hidden-one", "hidden-two", "hidden-model", "alone-model"])
def test_a_key_of_some_models_hears_of_no_others(asked: str) -> None:
    """Whether one of that name is there, answers, is of a model of another name, or is one of several."""
    records = [
        record("tale", "tiny"),
        record("hidden-one", "hidden-model"),
        record("hidden-two", "hidden-model", DeploymentPhase.WAITING),
        record("alone", "alone-model"),
    ]
    state = State(instance="x", deployments={each.name: each for each in records})
    front = RequestFront(lambda: state, TrafficBook(), lambda: 0.0)
    for each in records:
        front.attach(each.name, Epoch(1), NodeId("id-a"), NodeName("a"))
    chats: Any = SimpleNamespace(prompt=None, tokenize=None, detokenize=None, texts=None)
    models: Any = SimpleNamespace()
    backend = SiteBackend(front, models, chats)
    caller = Caller("key/app", frozenset({"tiny", "gone"}))
    with pytest.raises(DeniedError) as refused:
        caller.find(backend, asked)
    assert (refused.value.field, refused.value.reason) == ("model", "KEY_SCOPE")
    said = refused.value.message.replace(repr(asked), "")
    assert said == "this API key is not for model : it is for gone, tiny; ask the operator for another"
    assert caller.find(backend, "tale").model == caller.find(backend, "tiny").model == "tiny"
    with pytest.raises(NotFoundError, match=r"served: tale$"):
        caller.find(backend, "gone")
    assert Caller("key/all").find(backend, "alone-model").deployment == "alone"
