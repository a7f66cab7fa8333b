"""What an operator does on the dashboard about keys, nodes and join tokens: the SDK's calls, their
answers as JSON. The answer about a node has the reasons why deployments have no layers on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from edgeshard.domain.checks import at_most
from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.rules import RuledNode, RuleKind, broken, resolve
from edgeshard.domain.deployments.traffic import WORTH_SAYING
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.identity import MOST_KEY_MODELS, ApiKey, Role
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.labels import MOST_LABELS, parse_changes
from edgeshard.wire.invitations import invitation_to_text, line_without_edgeshard
from edgeshard_coordinator.dashboard.operator import FORMS, Action, Named, Operator, Removal
from edgeshard_coordinator.dashboard.picture import known

_CAPS = (RuleKind.MAX_WATTS, RuleKind.MAX_COST)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a node is not used, as sentences, and the line of `edgectl` that changes it or shows
    more."""

    text: str
    line: str


def describe_line(name: str) -> str:
    return f"edgectl describe deployment {name}"


def is_used(node: Node, deployment: Deployment) -> bool:
    return any(stage.node_id == node.node_id for stage in deployment.placement.stages)


def cause_without_plan(node: Node, deployment: Deployment, nodes: Sequence[Node]) -> Cause | None:
    """The cause that needs no planning, None if there is none. `nodes` are all of the site."""
    spec, name = deployment.spec, deployment.spec.name
    describe = describe_line(name)
    if not node.connected:
        silence = f"the coordinator last heard of it {node.heartbeat_age_s:.0f} s ago"
        why = f"The node is disconnected: {silence}. Check the machine and its agent's log."
        return Cause(why, "edgectl doctor")
    if node.starting:
        why = "The node is still starting. It can hold layers when it is connected."
        return Cause(why, "edgectl get nodes")
    if spec.layers:
        why = f"An operator placed {name} by hand: {_names(deployment.placement)}."
        return Cause(f"{why} Deploy it without --layers to have it planned.", describe)
    if node.name in spec.exclude:
        why = f"{name} excludes it. Deploy it without --exclude {node.name} to allow it."
        return Cause(why, describe)
    if texts := _broken_rules(node, deployment, nodes):
        quoted = ", ".join(repr(text) for text in texts)
        why = f"With the nodes of {name}, it would break {quoted}."
        return Cause(f"{why} Change labels of nodes, or deploy {name} with other rules.", describe)
    return None


def cause_of_plan(node: Node, name: str, plan: ReplanResult) -> Cause:
    """The cause by a plan for all nodes of the site, which `plan` compares with the placement that
    runs."""
    best = plan.found
    note = f" {best.note}" if best.note else ""
    replan = f"edgectl replan {name}"
    is_in_best = any(stage.node_id == node.node_id for stage in best.stages)
    if is_in_best and plan.gain is not None and plan.gain >= WORTH_SAYING:
        gain = f"{100 * plan.gain:.0f} % better"
        why = f"{name} was placed before. A placement with this node is {gain}: move it there."
        return Cause(why, replan)
    if is_in_best and plan.reason is not ReplanReason.NOT_WEIGHED:
        gain = f"less than {100 * WORTH_SAYING:.0f} % better"
        why = f"A placement with this node is {gain}, so {name} stays where it is."
        return Cause(why, f"{replan} --force")
    if is_in_best:
        why = "A placement with this node cannot be compared with the one that runs."
        return Cause(f"{why} {plan.note}{note}", replan)
    limit = "" if best.predicted is None else f" Its limit: {best.predicted.bottleneck}."
    unknown = _measurements(node)
    why = f"The planner chose {_names(best)} for {name}.{limit}{note}{unknown}"
    return Cause(why, f"{replan} --dry-run")


def _measurements(node: Node) -> str:
    missing = node.unknown_profiles + node.unknown_links
    if not missing:
        return ""
    return f" {missing} measurements of this node are missing: run edgectl profile."


def _broken_rules(node: Node, deployment: Deployment, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The rules that the deployment's nodes break together with this one, whatever nodes are added.

    Caps of watts and costs are left to the planner, which knows the figures.
    """
    rules = [rule for rule in deployment.spec.rule if rule.kind not in _CAPS]
    try:
        conditions = resolve(rules, [RuledNode(one.name, one.labels) for one in nodes])
    except InvalidArgumentError as error:
        return (error.message,)
    final = [condition for condition in conditions if condition.is_monotone]
    names = {str(stage.node_name) for stage in deployment.placement.stages}
    before = broken(final, names)
    return tuple(text for text in broken(final, {*names, str(node.name)}) if text not in before)


def _names(placement: Placement) -> str:
    return ", ".join(f"{stage.node_name} ({stage.layers})" for stage in placement.stages)


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
    """The body that changes a node's labels. Each of `changes` is KEY=VALUE to set it or KEY- to
    remove it."""

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
    """Why deployments have no layers on a node, by deployment. It plans each of them again, and
    moves none."""
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
    """The lines by which one more node joins, with EdgeShard and without. They are shown this
    once."""
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
