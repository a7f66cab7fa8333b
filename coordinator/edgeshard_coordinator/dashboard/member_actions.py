"""What an operator does on the dashboard about keys, nodes and join tokens: the SDK's calls, their answers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from edgeshard.domain.checks import at_most
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import MOST_KEY_MODELS, ApiKey, Role
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.labels import MOST_LABELS, parse_changes
from edgeshard.wire.invitations import invitation_to_text, line_without_edgeshard
from edgeshard_coordinator.dashboard.bodies import FORMS, Named, Removal
from edgeshard_coordinator.dashboard.operator import Action, Operator
from edgeshard_coordinator.dashboard.picture import known
from edgeshard_coordinator.dashboard.unused_nodes import (
    Cause,
    cause_of_plan,
    cause_without_plan,
    describe_line,
    is_used,
)

JOIN_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class NewKey:
    """The body that creates an API key, with fields as `ApiKey` has them."""

    name: str
    models: Annotated[tuple[str, ...], at_most(MOST_KEY_MODELS)] = ()
    tokens_per_minute: int | None = None
    requests: int | None = None
    metrics: bool = False


@dataclass(frozen=True, slots=True)
class Labelling:
    """The body that changes a node's labels. Each of `changes` is KEY=VALUE to set it or KEY- to remove it."""

    name: str
    changes: Annotated[tuple[str, ...], at_most(2 * MOST_LABELS)]


@dataclass(frozen=True, slots=True)
class TokenId:
    """The body that revokes a join token."""

    token_id: str


# Keys


async def keys(operator: Operator, form: Mapping[str, Any]) -> Any:
    """The API keys with their limits and their usage since the coordinator began. If a key has no
    limit, the coordinator's quota counts."""
    api_keys = await operator.keys()
    return {"keys": [_key(key) | {"usage": operator.usage_of(key)} for key in api_keys]}


async def create_key(operator: Operator, form: Mapping[str, Any]) -> Any:
    """A new key, and its text, which no other answer has."""
    body = FORMS.read(NewKey, form)
    key, text = await operator.create_key(
        body.name,
        body.models,
        tokens_per_minute=body.tokens_per_minute,
        requests=body.requests,
        metrics=body.metrics,
    )
    return {"key": _key(key), "text": text}


async def revoke_key(operator: Operator, form: Mapping[str, Any]) -> Any:
    await operator.revoke_key(FORMS.read(Named, form).name)
    return {}


def _key(key: ApiKey) -> dict[str, Any]:
    return known(
        name=key.name,
        models=list(key.models),
        tokens_per_minute=key.tokens_per_minute,
        requests=key.requests,
        metrics=key.metrics or None,
        created_at=key.created_at,
    )


# Nodes


async def label(operator: Operator, form: Mapping[str, Any]) -> Any:
    body = FORMS.read(Labelling, form)
    labels, removed = parse_changes(body.changes, "changes")
    return {"labels": dict((await operator.label_node(body.name, labels, removed)).labels)}


async def remove_node(operator: Operator, form: Mapping[str, Any]) -> Any:
    await operator.remove_node(FORMS.read(Removal, form).name)
    return {}


async def unused(operator: Operator, form: Mapping[str, Any]) -> Any:
    """Why deployments have no layers on a node, by deployment. It plans each of them again, and moves none."""
    body = FORMS.read(Named, form)
    node = await operator.node(body.name)
    nodes = await operator.nodes()
    causes = {}
    for deployment in await operator.deployments():
        if not is_used(node, deployment):
            cause = await _cause(operator, node, deployment, nodes)
            causes[str(deployment.spec.name)] = {"why": cause.text, "line": cause.line}
    return {"causes": causes}


async def _cause(
    operator: Operator,
    node: Node,
    deployment: Deployment,
    nodes: tuple[Node, ...],
) -> Cause:
    name = deployment.spec.name
    cause = cause_without_plan(node, deployment, nodes)
    if cause is not None:
        return cause
    try:
        plan = await operator.replan(name, dry_run=True, wait=False)
    except EdgeShardError as error:
        return Cause(error.message, describe_line(name))
    return cause_of_plan(node, name, plan)


# Join tokens


async def join(operator: Operator, form: Mapping[str, Any]) -> Any:
    """The lines by which one more node joins, with EdgeShard and without. They are shown this once."""
    name = FORMS.read(Named, form).name
    token = await operator.create_token(Role.AGENT, name, ttl_s=JOIN_TTL_S)
    line = f"edgectl join {invitation_to_text(token.invitation)}"
    return known(line=line, bare=line_without_edgeshard(token) or None)


async def tokens(operator: Operator, form: Mapping[str, Any]) -> Any:
    """The open join tokens, without their secrets."""
    open_tokens = await operator.open_tokens()
    return {
        "tokens": [
            known(
                id=token.token_id,
                role=token.role.value,
                name=token.id,
                created_at=token.created_at or None,
                expires_at=token.expires_at,
                creator=token.creator or None,
            )
            for token in open_tokens
        ]
    }


async def revoke_token(operator: Operator, form: Mapping[str, Any]) -> Any:
    await operator.revoke_token(FORMS.read(TokenId, form).token_id)
    return {}


GET: Mapping[str, Action] = {"keys": keys, "tokens": tokens, "unused": unused}
POST: Mapping[str, Action] = {
    "create-key": create_key,
    "revoke-key": revoke_key,
    "label": label,
    "remove-node": remove_node,
    "join": join,
    "revoke-token": revoke_token,
}
