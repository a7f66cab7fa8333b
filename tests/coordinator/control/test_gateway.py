"""What the gateway asks of the coordinator, where no site is needed to tell."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from edgeshard_coordinator.control.gateway import SiteBackend

from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.generation import Token


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
