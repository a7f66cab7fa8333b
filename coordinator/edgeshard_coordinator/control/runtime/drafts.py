"""The draft of a deployment that is about to be placed, among the models of the store."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeshard.domain.deployments.deployment import AUTO_DRAFT, NO_DRAFT, DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedDraft
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import ModelManifest
from edgeshard.storage.forms import TOKENIZER
from edgeshard_coordinator.control.requests.chats import Chats
from edgeshard_coordinator.control.requests.site_models import Models
from edgeshard_coordinator.core.placement.drafts import (
    check_draft,
    check_same_tokens,
    may_draft,
    placed_draft,
)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens are compared by the tokenizers' output, in the process that runs these."""

    models: Models
    chats: Chats

    async def of(
        self, spec: DeploymentSpec, model: ModelManifest
    ) -> tuple[DeploymentSpec, PlacedDraft | None]:
        """The spec with the draft that is used, and that draft as it is placed; None if there is
        none.

        Raises NotFoundError or InvalidArgumentError naming `draft`, FailedPreconditionError if a
        model has no tokenizer.
        """
        if spec.draft == NO_DRAFT or spec.speculation == "off":
            return spec, None
        if spec.draft != AUTO_DRAFT:
            draft, digest = self._named(spec.draft)
            check_draft(model, draft)
            await self._check_tokens(model, draft)
            return spec, placed_draft(spec, model, draft, digest)
        for draft, digest in may_draft(model, self.models.list()):
            try:
                await self._check_tokens(model, draft)
            except EdgeShardError:
                continue
            return replace(spec, draft=str(draft.name)), placed_draft(spec, model, draft, digest)
        return spec, None

    def _named(self, name: str) -> tuple[ModelManifest, Digest]:
        try:
            return self.models.get(name)
        except NotFoundError as error:
            raise NotFoundError(
                f"draft: {error.message}", field="draft", reason=error.reason
            ) from None

    async def _check_tokens(self, model: ModelManifest, draft: ModelManifest) -> None:
        """Raise InvalidArgumentError if ids do not mean the same to both; equal files are not
        opened."""
        files = [
            next((file.sha256 for file in one.files if file.name == TOKENIZER), None)
            for one in (model, draft)
        ]
        if files[0] is not None and files[0] == files[1]:
            return
        try:
            ours, its = [await self.chats.vocabulary(one.digest()) for one in (model, draft)]
        except EdgeShardError as error:
            raise type(error)(
                f"draft: {error.message}", field="draft", reason=error.reason
            ) from None
        check_same_tokens(model.name, ours, draft.name, its)
