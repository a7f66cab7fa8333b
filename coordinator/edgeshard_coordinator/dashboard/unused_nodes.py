"""Why a deployment has no layers on a node: by the node's state, by the deployment's spec, or by the planner. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeshard.domain.control.site import ReplanReason, ReplanResult
from edgeshard.domain.deployments.deployment import Deployment
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.rules import RuledNode, RuleKind, broken, resolve
from edgeshard.domain.deployments.traffic import WORTH_SAYING
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.device import Node

_CAPS = (RuleKind.MAX_WATTS, RuleKind.MAX_COST)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a node is not used, as sentences, and the line of `edgectl` that changes it or shows more."""

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
    """The cause by a plan for all nodes of the site, which `plan` compares with the placement that runs."""
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
