"""What the site's models say of talking with them: prompts of conversations, and their tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgeshard.chat.process import ChatProcess, ModelFiles
from edgeshard.domain.chat import ChatPrompt, Conversation
from edgeshard_coordinator.control.models import Models, max_context
from edgeshard_coordinator.core.state import DeploymentRecord


class Chats:
    """`record_of` gives the deployment that serves under a name, as for a request to generate."""

    def __init__(self, record_of: Callable[[str], DeploymentRecord], models: Models) -> None:
        self._record_of = record_of
        self._models = models
        self._process = ChatProcess()

    async def prompt(self, model: str, conversation: Conversation) -> ChatPrompt:
        """Raises as `RequestFront.record_of` and `ChatProcess.prompt` do."""
        record = self._record_of(model)
        prompt = await self._process.prompt(self._files(record), conversation)
        context = max_context(record, self._models)
        left = context - len(prompt.tokens) if context else record.spec.max_new_tokens
        return replace(prompt, room=min(record.spec.max_new_tokens, left) or -1)

    async def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        return await self._process.tokenize(self._files(self._record_of(model)), text, special)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        return await self._process.detokenize(self._files(self._record_of(model)), tokens)

    async def texts(self, model: str, tokens: Sequence[int]) -> list[str]:
        """What each token reads within a text."""
        return await self._process.texts(self._files(self._record_of(model)), tokens)

    async def close(self) -> None:
        await self._process.close()

    def _files(self, record: DeploymentRecord) -> ModelFiles:
        manifest, digest = self._models.get(record.manifest_digest)
        return ModelFiles(digest, {file.name: self._models.file_path(file.sha256) for file in manifest.files})
