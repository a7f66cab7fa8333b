"""The gateway's calls to the coordinator, tested without a site."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from edgeshard_coordinator.control.requests.chats import COUNTED_LIMIT_BYTES, Chats
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.traffic import TrafficBook
from edgeshard_coordinator.control.services.gateway import SiteBackend
from edgeshard_coordinator.core.values.quotas import Quota, Quotas
from edgeshard_coordinator.core.values.state import DeploymentRecord, State

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.errors import (
    DeniedError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from edgeshard.domain.ids import Digest, Epoch, NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import Token
from edgeshard.gateway.access.auth import Caller, unending


def record(
    name: str, model: str, phase: DeploymentPhase = DeploymentPhase.READY
) -> DeploymentRecord:
    spec = parse_spec({"name": name, "model": model, "source": "a", "max_context": 64})
    stage = PlacedStage(0, NodeId("id-a"), NodeName("a"), "a:7000", LayerRange(0, 6), 1000, 1000)
    placement = Placement((stage,), 16, 8, 1, 1)
    return DeploymentRecord("u", spec, Digest("d" * 64), placement, Epoch(1), phase)


class Front:
    """Two deployments of one model."""

    def __init__(self) -> None:
        self.served = self
        self.known = {
            name: SimpleNamespace(served_name=name, manifest_digest="d" * 64)
            for name in ("one", "two")
        }

    def check_place(self, identity: str, reading: int) -> None:
        pass

    def records(self) -> tuple[Any, ...]:
        return tuple(self.known.values())

    def find(self, model: str) -> Any:
        if model not in self.known:
            raise NotFoundError("gone", field="model")
        return self.known[model]


async def test_texts_of_tokens_outlive_another_deployment_of_the_model() -> None:
    front: Any = Front()

    async def texts(model: str, tokens: Sequence[int]) -> list[str]:
        front.find(model)
        return [f"t{token}" for token in tokens]

    chats: Any = SimpleNamespace(prompt=None, tokenize=None, detokenize=None, texts=texts)
    backend = SiteBackend(front, SimpleNamespace(), chats)
    await backend.words("one").learn(Token(0, 5, ""))
    words = backend.words("two")
    del front.known["one"]
    await words.learn(Token(0, 6, ""))
    assert words.text(6) == "t6" and backend.words("two") is words


class Rendered:
    """Chats that make as many tokens as the test sets."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tuple(range(tokens))

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        return ChatPrompt(self._tokens)

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        return self._tokens

    detokenize = texts = None


async def test_tokens_that_are_counted_are_charged_to_who_asks() -> None:
    now = 0.0
    quotas = Quotas({"key/me": Quota(tokens_per_minute=600, requests=2)})
    front = RequestFront(lambda: State(instance="test"), TrafficBook(), lambda: now, quotas=quotas)
    chats: Any = Rendered(700)
    backend = SiteBackend(front, SimpleNamespace(), chats)
    conversation = Conversation("[]")
    for ask in (
        lambda: backend.tokenize("m", "text", True, "key/me"),
        lambda: backend.count("m", conversation, "key/me"),
    ):
        backend.check_place("key/me", 1)
        await ask()
        for refused in (
            backend.tokenize("m", "text", True, "key/me"),
            backend.count("m", conversation, "key/me"),
        ):
            with pytest.raises(ResourceExhaustedError) as caught:
                await refused
            assert caught.value.field == "tokens_per_minute" and caught.value.retry_after_s
        with pytest.raises(ResourceExhaustedError):
            backend.check_place("key/me", 0)
        assert await backend.tokenize("m", "text", True, "key/other"), "nobody else pays for it"
        now += 1000.0
    await backend.prompt("m", conversation, "key/me")
    backend.check_place("key/me", 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        backend.check_place("key/me", 2)
    assert caught.value.field == "requests"


async def test_a_text_whose_tokens_are_counted_has_a_limit() -> None:
    models: Any = SimpleNamespace()
    chats = Chats(lambda model: SimpleNamespace(), models)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidArgumentError) as caught:
        await chats.tokenize("m", "x" * (COUNTED_LIMIT_BYTES + 1), True, "key/me")
    assert caught.value.field == "prompt"
    quotas = SimpleNamespace(check_debt=lambda identity: None)
    front: Any = SimpleNamespace(check_place=None, quotas=quotas)
    with pytest.raises(InvalidArgumentError) as caught:
        await SiteBackend(front, models, chats).count(
            "m", Conversation("x" * (COUNTED_LIMIT_BYTES + 1)), "key/me"
        )
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "asked", ["nothing", "hidden", "hidden-one", "hidden-two", "hidden-model", "alone-model"]
)
def test_a_key_of_some_models_hears_of_no_others(asked: str) -> None:
    """Whether one of that name is there, answers, is of a model of another name, or is one of
    several."""
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
    caller = Caller("key/app", frozenset({"tiny", "gone"}), check=unending)
    with pytest.raises(DeniedError) as refused:
        caller.find(backend, asked)
    assert (refused.value.field, refused.value.reason) == ("model", "KEY_SCOPE")
    said = refused.value.message.replace(repr(asked), "")
    assert (
        said == "this API key does not allow model , only gone, tiny; request another key from the "
        "operator"
    )
    assert caller.find(backend, "tale").model == caller.find(backend, "tiny").model == "tiny"
    with pytest.raises(NotFoundError, match=r"served: tale$"):
        caller.find(backend, "gone")
    assert Caller("key/all", check=unending).find(backend, "alone-model").deployment == "alone"
