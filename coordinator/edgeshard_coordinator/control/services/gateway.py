"""The HTTP gateway in this process: the identity of a caller by its key, and a request's way
straight to the way in for requests, under that identity."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from functools import partial

from edgeshard.domain.control.site import ServedModel, StoredModel
from edgeshard.domain.errors import EdgeShardError, UnauthenticatedError
from edgeshard.domain.identity import key_identity
from edgeshard.domain.ids import DeploymentName, Digest, RequestId
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import Generation, GenerationEvent
from edgeshard.gateway.access.auth import Caller, unending
from edgeshard.gateway.backend import Words
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.control.requests.chats import Chats, check_counted
from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.site_models import Models, served_model, stored_model
from edgeshard_coordinator.membership.api_keys import PREFIX, KeyBook

ANYONE = ""
"""The identity of a caller without a key if none is required: everybody's in plaintext."""


class ApiKeyAuthenticator:
    """Admits a caller with a key of the site; anybody else too, if it `asks` for none."""

    def __init__(self, keys: KeyBook, audit: AuditLog, *, asks: bool = True) -> None:
        self._keys = keys
        self._audit = audit
        self._asks = asks

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        try:
            return self._caller(key)
        except UnauthenticatedError as error:
            self._audit.add(
                "nobody", what, "", error.reason, address, by_operator=False, kind="HTTP"
            )
            raise

    def _caller(self, key: str | None) -> Caller:
        # Clients that must be given some key send "EMPTY", "none" and the like.
        if not self._asks and (key is None or not key.startswith(PREFIX)):
            return Caller(ANYONE, metrics=True, check=unending)
        if key is None:
            raise UnauthenticatedError(
                "the API key is missing in Authorization or x-api-key: send `Authorization: Bearer "
                "KEY`; an "
                "operator creates a key with edgectl key create NAME",
                field="api_key",
                reason="NO_API_KEY",
            )
        api_key = self._keys.find(key)
        identity = key_identity(api_key.name, api_key.key_id)
        models = frozenset(api_key.models) if api_key.models else None
        return Caller(identity, models, api_key.metrics, check=partial(self._keys.check, identity))


class SiteBackend:
    """The gateway's way to the coordinator. No token passes the state loop."""

    def __init__(self, front: RequestFront, models: Models, chats: Chats) -> None:
        self._front = front
        self._models = models
        self._words: dict[tuple[DeploymentName, Digest], Words] = {}
        self._chats = chats
        self.prompt, self.detokenize = chats.prompt, chats.detokenize
        self.check_place = front.check_place

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        self._front.quotas.check_debt(identity)
        tokens = await self._chats.tokenize(model, text, special, identity)
        self._front.quotas.charge(identity, len(tokens))
        return tokens

    async def count(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        self._front.quotas.check_debt(identity)
        for field in ("messages", "tools"):
            check_counted(getattr(conversation, field), field)
        prompt = await self._chats.prompt(model, conversation, identity)
        self._front.quotas.charge(identity, len(prompt.tokens))
        return prompt

    def models(self) -> tuple[ServedModel, ...]:
        return tuple(served_model(record, self._models) for record in self._front.served.ready())

    def find(self, model: str, only: frozenset[str] | None = None) -> ServedModel:
        return served_model(self._front.served.find(model, only), self._models)

    def stored(self, model: str) -> StoredModel | None:
        try:
            return stored_model(*self._models.get(self._front.served.find(model).manifest_digest))
        except EdgeShardError:
            return None  # Its manifest is damaged; the nodes still serve what they loaded.

    def added_at(self, model: str) -> float:
        try:
            return self._models.added_at(self._front.served.find(model).manifest_digest)
        except (EdgeShardError, OSError):
            return 0.0  # It was deleted since; the nodes still serve what they loaded.

    async def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        running = self._front.start(model, generation, RequestId(uuid.uuid4().hex), identity)
        try:
            async for event in running.events():
                yield event
        finally:
            self._front.abandon(running)

    def words(self, model: str) -> Words:
        record = self._front.served.find(model)
        # Asked for by the deployment's name: another one of the same model may go away.
        model_key = (record.served_name, record.manifest_digest)
        if model_key not in self._words:
            served_keys = {
                (record.served_name, record.manifest_digest)
                for record in self._front.served.records()
            }
            self._words = {key: words for key, words in self._words.items() if key in served_keys}
            self._words[model_key] = Words(partial(self._chats.texts, record.served_name))
        return self._words[model_key]
