"""The HTTP gateway in this process: a request goes straight to the way in for requests, under its key's identity."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from edgeshard.chat.process import ChatProcess, ModelFiles
from edgeshard.domain.chat import ChatPrompt, Conversation
from edgeshard.domain.deployment import DeploymentPhase
from edgeshard.domain.errors import UnauthenticatedError
from edgeshard.domain.generation import Generation, GenerationEvent
from edgeshard.domain.ids import Digest, RequestId
from edgeshard.domain.site import ServedModel
from edgeshard.gateway.backend import Caller
from edgeshard.gateway.words import Words
from edgeshard_coordinator.control.audit_log import AuditLog
from edgeshard_coordinator.control.models import served_model
from edgeshard_coordinator.control.requests import RequestFront
from edgeshard_coordinator.membership.keys import PREFIX, KeyBook, identity_of
from edgeshard_coordinator.store import ModelStore

ANYONE = ""
"""Who comes without a key where none is asked for: as everybody in plaintext."""


class KeyDoors:
    """Lets in who shows a key of the site; where it `asks` for none, anybody else too."""

    def __init__(self, keys: KeyBook, audit: AuditLog, *, asks: bool = True) -> None:
        self._keys = keys
        self._audit = audit
        self._asks = asks

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        try:
            return self._caller(key)
        except UnauthenticatedError as error:
            self._audit.add("nobody", what, "", error.reason, address, by_operator=False)
            raise

    def _caller(self, key: str | None) -> Caller:
        # Clients that must be given some key send "EMPTY", "none" and the like.
        if not self._asks and (key is None or not key.startswith(PREFIX)):
            return Caller(ANYONE)
        if key is None:
            raise UnauthenticatedError(
                "no API key was shown: send `Authorization: Bearer KEY`; an operator makes a key with edgectl key "
                "create NAME",
                field="api_key",
                reason="NO_API_KEY",
            )
        found = self._keys.find(key)
        return Caller(identity_of(found.name), frozenset(found.models) if found.models else None)


class SiteBackend:
    """What the gateway asks of the coordinator. No token passes the state loop."""

    def __init__(self, front: RequestFront, store: ModelStore, chat: ChatProcess) -> None:
        self._front = front
        self._store = store
        self._chat = chat
        self._words: dict[Digest, Words] = {}

    def models(self) -> tuple[ServedModel, ...]:
        ready = [record for record in self._front.records() if record.phase is DeploymentPhase.READY]
        return tuple(served_model(record, self._store) for record in ready)

    def find(self, model: str) -> ServedModel:
        return served_model(self._front.find(model), self._store)

    async def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        running = self._front.start(model, generation, RequestId(uuid.uuid4().hex), identity)
        try:
            async for event in running.events():
                yield event
        finally:
            self._front.abandon(running)

    async def prompt(self, model: str, conversation: Conversation) -> ChatPrompt:
        return await self._chat.prompt(self._files(model), conversation)

    async def tokenize(self, model: str, text: str, special: bool) -> tuple[int, ...]:
        return await self._chat.tokenize(self._files(model), text, special)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        return await self._chat.detokenize(self._files(model), tokens)

    def words(self, model: str) -> Words:
        files = self._files(model)
        if files.digest not in self._words:
            known = {record.manifest_digest for record in self._front.records()}
            self._words = {digest: words for digest, words in self._words.items() if digest in known}
            self._words[files.digest] = Words(partial(self._chat.texts, files))
        return self._words[files.digest]

    def _files(self, model: str) -> ModelFiles:
        manifest, digest = self._store.get(self._front.find(model).manifest_digest)
        return ModelFiles(digest, {file.name: self._store.file(file) for file in manifest.files})
