"""Conversations with the site's models: their prompts, and the models' tokenizers.

Every `identity` gets a fair share. Tokens are counted of texts of bounded length only, and are
charged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgeshard.chat.template_process import ChatProcess, ModelFiles
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Digest
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import text_bytes
from edgeshard_coordinator.control.requests.site_models import Models, max_context
from edgeshard_coordinator.core.values.state import DeploymentRecord

COUNTED_LIMIT_BYTES = 1 << 20
"""Bytes of a text, or of a conversation, of which only the token ids are wanted."""

UNKNOWN_CONTEXT = 2**31 - 1
"""The context of a model whose manifest is damaged: its head knows it, and clips requests to it."""


class Chats:
    """`record_of` returns the deployment that serves under a name, as for a request to generate."""

    def __init__(self, record_of: Callable[[str], DeploymentRecord], models: Models) -> None:
        self._record_of = record_of
        self._models = models
        self._process = ChatProcess()

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        """The conversation as tokens, with the room that is left for an answer. Raises as
        `ServedDeployments.record_of` and `ChatProcess.prompt` do."""
        record = self._record_of(model)
        files = self._files(record)
        prompt = await self._process.prompt(files, conversation, identity)
        context = files.max_context or UNKNOWN_CONTEXT
        left = context - len(prompt.tokens)
        return replace(prompt, room=min(record.spec.most_new_tokens(context), left) or -1)

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        """Raises InvalidArgumentError naming `prompt` for a text that is too long, and as `prompt`
        does."""
        check_counted(text, "prompt")
        return await self._process.tokenize(
            self._files(self._record_of(model)), text, special, identity
        )

    async def detokenize(self, model: str, tokens: Sequence[int], identity: str) -> str:
        return await self._process.detokenize(self._files(self._record_of(model)), tokens, identity)

    async def texts(self, model: str, tokens: Sequence[int]) -> list[str]:
        """The text of each token within a text."""
        return await self._process.texts(self._files(self._record_of(model)), tokens)

    async def vocabulary(self, digest: Digest) -> str:
        """As `ChatProcess.vocabulary`, of a stored model."""
        return await self._process.vocabulary(self._files_of(digest))

    async def close(self) -> None:
        await self._process.close()

    def _files(self, record: DeploymentRecord) -> ModelFiles:
        return self._files_of(record.manifest_digest, max_context(record, self._models))

    def _files_of(self, digest: Digest, context: int = 0) -> ModelFiles:
        manifest, digest = self._models.get(digest)
        paths = {file.name: self._models.file_path(file.sha256) for file in manifest.files}
        return ModelFiles(digest, paths, context)


def check_counted(text: str, field: str) -> None:
    """Raise InvalidArgumentError naming `field` for a text that is too long to have its tokens
    counted."""
    if text_bytes(text) > COUNTED_LIMIT_BYTES:
        raise InvalidArgumentError(
            f"{field}: at most {COUNTED_LIMIT_BYTES} bytes are tokenised at once; send it in "
            "pieces",
            field=field,
            reason="PROMPT_TOO_LONG",
        )
