"""A draft that a deployment names, or that is chosen from the store, by what their tokenizers
say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from edgeshard_coordinator.control.runtime.drafts import Drafts

from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.model import FileInfo, ModelManifest
from edgeshard.proto.v1 import admin_pb2
from tests.support.scripted_agent import DEADLINE_S

Make = Callable[..., ModelManifest]


class Store:
    def __init__(self, *manifests: ModelManifest) -> None:
        self._manifests = manifests

    def get(self, name: str) -> tuple[ModelManifest, Digest]:
        for manifest in self._manifests:
            if manifest.name == name:
                return manifest, manifest.digest()
        raise NotFoundError(f"model {name!r} is unknown", field="model", reason="MODEL_NOT_FOUND")

    def list(self) -> tuple[tuple[ModelManifest, Digest], ...]:
        return tuple((manifest, manifest.digest()) for manifest in self._manifests)


class Tokenizers:
    """The vocabularies of models by digest; those that lack one have no tokenizer."""

    def __init__(self, **of: str) -> None:
        self.of = of
        self.asked = 0

    async def vocabulary(self, digest: Digest) -> str:
        self.asked += 1
        if digest not in self.of:
            raise FailedPreconditionError(
                "no tokenizer.json", field="tokenizer.json", reason="NO_TOKENIZER"
            )
        return self.of[digest]


def drafts(store: Store, tokenizers: Tokenizers) -> Drafts:
    return Drafts(store, tokenizers)  # type: ignore[arg-type]


def spec_of(**changes: Any) -> Any:
    return parse_spec(
        {"name": "tale", "model": "large", "source": "a", "draft": "small", **changes}
    )


def with_file(manifest: ModelManifest, digest: str) -> ModelManifest:
    return replace(manifest, files=(FileInfo("tokenizer.json", 9, Digest(digest * 64)),))


async def test_the_draft_that_is_named_is_placed(make_manifest: Make) -> None:
    large, small = make_manifest(40, "large"), make_manifest(1, "small")
    tokenizers = Tokenizers(**{large.digest(): "words", small.digest(): "words"})
    spec, placed = await drafts(Store(large, small), tokenizers).of(spec_of(), large)
    assert placed is not None and (placed.model, placed.manifest_digest) == (
        "small",
        small.digest(),
    )
    assert spec == spec_of() and tokenizers.asked == 2


async def test_equal_files_are_not_opened(make_manifest: Make) -> None:
    large, small = (
        with_file(make_manifest(layers, name), "b")
        for layers, name in ((40, "large"), (1, "small"))
    )
    _, placed = await drafts(Store(large, small), Tokenizers()).of(spec_of(), large)
    assert placed is not None


async def test_what_does_not_fit_is_refused_by_its_field(make_manifest: Make) -> None:
    large, small = make_manifest(40, "large"), with_file(make_manifest(1, "small"), "c")
    other, same = make_manifest(2, "other"), make_manifest(40, "same")
    tokenizers = Tokenizers(**{large.digest(): "words", other.digest(): "letters"})
    store = Store(large, small, other, same)
    wrong: list[tuple[str, type[EdgeShardError], str]] = [
        ("other", InvalidArgumentError, "DRAFT_TOKENIZER"),
        ("small", FailedPreconditionError, "NO_TOKENIZER"),
        ("same", InvalidArgumentError, "DRAFT_NOT_SMALLER"),
        ("nobody", NotFoundError, "MODEL_NOT_FOUND"),
    ]
    for name, kind, reason in wrong:
        with pytest.raises(kind, match=r"^draft: ") as caught:
            await drafts(store, tokenizers).of(spec_of(draft=name), large)
        assert (caught.value.field, caught.value.reason) == ("draft", reason)


async def test_one_that_suits_is_chosen_and_none_where_none_does(make_manifest: Make) -> None:
    large, letters = make_manifest(60, "large"), make_manifest(4, "letters")
    words, silent = make_manifest(2, "words"), make_manifest(3, "silent")
    tokenizers = Tokenizers(**{large.digest(): "w", words.digest(): "w", letters.digest(): "l"})
    spec, placed = await drafts(Store(letters, silent, words, large), tokenizers).of(
        spec_of(draft="auto"), large
    )
    assert placed is not None and spec.draft == placed.model == "words"
    spec, placed = await drafts(Store(letters, silent, large), tokenizers).of(
        spec_of(draft="auto"), large
    )
    assert placed is None and spec.draft == "auto"
    for changes in ({"draft": "off"}, {"draft": "auto", "speculation": "off"}):
        spec = spec_of(**changes)
        assert await drafts(Store(large, words), tokenizers).of(spec, large) == (spec, None)


async def test_the_head_is_told_of_its_draft_which_stays_in_the_store(
    site: Any, make_manifest: Make, failing: Any
) -> None:
    tiny, small = with_file(make_manifest(), "d"), with_file(make_manifest(2, "small"), "d")
    site.models.manifests.update(tiny=tiny, small=small)
    agents, _ = await site.deployed(draft="small")
    draft = agents[0].commands[0].placement.draft
    assert draft is not None and (draft.model, draft.manifest_digest, draft.layer_count) == (
        "small",
        small.digest(),
        2,
    )
    assert agents[0].commands[0].spec.draft == "small"
    async with failing(FailedPreconditionError) as caught:
        await site.admin.DeleteModel(
            admin_pb2.DeleteModelRequest(operation_id="op-3", name="small"), timeout=DEADLINE_S
        )
    assert caught[0].reason == "MODEL_IN_USE"
    async with failing(NotFoundError) as caught:
        await site.admin.Deploy(
            site.deploy_request("op-2", name="more", draft="nobody"), timeout=DEADLINE_S
        )
    assert caught[0].field == "draft"
