"""Whether a model can draft tokens for another one, and the memory that it needs with the first
layer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgeshard.architectures import architecture_named, parse_config
from edgeshard.architectures.record import Fused
from edgeshard.domain.deployments.deployment import DeploymentSpec, draft_spec
from edgeshard.domain.deployments.placement import PlacedDraft
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import Digest, NodeName
from edgeshard.domain.models.model import LayerRange, ModelManifest
from edgeshard.domain.requests.step import DRAFT_TOKENS, DRAFTED_REQUESTS
from edgeshard.planning.costs.costs import Load
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.inputs.workspace import SLACK_BYTES, logits_bytes, workspace_bytes
from edgeshard_coordinator.core.placement.by_memory import StageSizes

CHOSEN_SHARE = 8
"""A draft that the spec does not name has at most this part of the parameters."""


def check_draft(model: ModelManifest, draft: ModelManifest) -> None:
    """Raise InvalidArgumentError naming `draft` for a model that cannot draft for the other; it
    does not compare their tokens."""
    if parse_config(model.config).states:
        raise _unfit(
            f"a draft model cannot serve {model.name}, which keeps recurrent states per request; "
            "leave the draft out",
            "DRAFT_UNUSED",
        )
    if draft.parameter_count >= model.parameter_count:
        raise _unfit(
            f"{draft.name} has {draft.parameter_count} parameters, {model.name} "
            f"{model.parameter_count}; name a "
            "smaller model",
            "DRAFT_NOT_SMALLER",
        )
    shape = parse_config(draft.config)
    if shape.states:
        raise _unfit(
            f"{draft.name} keeps recurrent states per request, which cannot be rolled back after a "
            "rejected draft token",
            "DRAFT_KIND",
        )
    if not isinstance(architecture_named(shape.architecture).runs, Fused):
        raise _unfit(
            f"{draft.name} is a {shape.architecture}, which does not run in our own blocks",
            "DRAFT_KIND",
        )


def check_same_tokens(model: str, vocabulary: str, draft: str, its_vocabulary: str) -> None:
    """Raise InvalidArgumentError naming `draft` if the digests of the vocabularies differ."""
    if vocabulary != its_vocabulary:
        raise _unfit(
            f"the tokenizer of {draft} gives other ids than that of {model}; name a model with the "
            "same vocabulary",
            "DRAFT_TOKENIZER",
        )


def may_draft(
    model: ModelManifest, others: Iterable[tuple[ModelManifest, Digest]]
) -> list[tuple[ModelManifest, Digest]]:
    """The models of a store that may be chosen as its draft, the largest first: larger ones draft
    better."""
    drafts = []
    for other, digest in others:
        if other.parameter_count * CHOSEN_SHARE > model.parameter_count:
            continue
        try:
            check_draft(model, other)
        except EdgeShardError:
            continue
        drafts.append((other, digest))
    return sorted(drafts, key=lambda item: (-item[0].parameter_count, item[0].name))


def placed_draft(
    spec: DeploymentSpec, model: ModelManifest, draft: ModelManifest, digest: Digest
) -> PlacedDraft:
    """The draft of a deployment of `model`, as it is placed with the first layer. Raises as
    `check_draft` does."""
    check_draft(model, draft)
    shape, most = parse_config(draft.config), parse_config(model.config).max_context
    requests = min(DRAFTED_REQUESTS, spec.concurrency * (2 if spec.kv_overcommit else 1))
    own = replace(draft_spec(spec), max_context=min(spec.max_context or most, shape.max_context))
    sizes = StageSizes(own, draft, shape, Load(), requests)
    layers = LayerRange(0, shape.layer_count)
    described = model_from_config(draft.name, draft.config)
    # The memory that stages share is counted with the first one.
    working = workspace_bytes(described, spec.dtype, requests * DRAFT_TOKENS, 0) - SLACK_BYTES
    return PlacedDraft(
        model=draft.name,
        manifest_digest=digest,
        layer_count=shape.layer_count,
        requests=requests,
        kv_blocks=sizes.kv_blocks,
        parameter_bytes=sizes.parameter_bytes(layers, NodeName("")),
        kv_bytes=sizes.kv_bytes(layers),
        workspace_bytes=working + logits_bytes(described, spec.dtype, requests),
    )


def _unfit(why: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError.about("draft", why, reason)
