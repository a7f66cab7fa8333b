"""The rules of a deployment in its placement: the sets of nodes that they allow, and the rules that
conflict. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.rules import (
    ConditionKind,
    RuleCondition,
    RuledNode,
    barred,
    broken,
    conflicting,
    resolve,
)
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError, PlacementError
from edgeshard_coordinator.core.values.candidate import Candidate

RULES_CONFLICT = "RULES_CONFLICT"
MOST_SETS = 2048
"""Sets of nodes that are tried for one placement."""
MOST_STEPS = 1 << 16
"""Steps of one search for sets."""


def conditions_of(
    spec: DeploymentSpec, candidates: Collection[Candidate]
) -> tuple[RuleCondition, ...]:
    """The conditions of a spec's rules. Raises InvalidArgumentError naming the rule that is about
    nothing there is, or for an option that does not go with rules."""
    if not spec.rule:
        return ()
    if spec.allow_streaming or spec.objective == "energy":
        what = "allow_streaming" if spec.allow_streaming else "the objective energy"
        why = f"{what} is not placed under rules yet; leave out one of the two"
        raise InvalidArgumentError.about("rule", why, "RULES_NOT_SUPPORTED")
    by_name = {node.name: node for node in sorted(candidates, key=lambda node: node.connected)}
    return resolve(
        spec.rule, [RuledNode(node.name, node.labels, node.busy_w) for node in by_name.values()]
    )


def check_rules(conditions: Sequence[RuleCondition], used: Collection[str]) -> None:
    """Raise PlacementError naming the rules that a placement on these nodes would break."""
    if broken_rules := broken(conditions, used):
        why = (
            f"layers on {', '.join(sorted(used))} break {_quoted(broken_rules)}; place them "
            "otherwise, or change the rule"
        )
        raise PlacementError.about("rule", why, "RULE_BROKEN")


def allowed_sets(
    conditions: Sequence[RuleCondition], names: Sequence[str], must: str
) -> Iterator[frozenset[str]]:
    """The sets of `names` with `must` that meet the conditions: sets with the first names precede
    others.

    All of them for at most 16 nodes; for more it ends after `MOST_STEPS`.
    """
    order = [must, *(name for name in names if name != must)]
    open_sets: list[tuple[int, frozenset[str]]] = [(1, frozenset({must}))]
    for _ in range(MOST_STEPS):
        if not open_sets:
            return
        index, used = open_sets.pop()
        if not all(_may_yet(condition, used, order[index:]) for condition in conditions):
            continue
        if index == len(order):
            yield used
        else:
            open_sets += [(index + 1, used), (index + 1, used | {order[index]})]


def allowed_sources(
    spec: DeploymentSpec, candidates: Collection[Candidate], sources: Sequence[Candidate]
) -> Sequence[Candidate]:
    """The nodes of `sources` that are in a set which the rules allow; if there is none, those that
    no single rule refuses, for their errors.

    Raises as `conditions_of`.
    """
    conditions = conditions_of(spec, candidates)
    if not conditions:
        return sources
    names = [
        str(node.name) for node in candidates if node.placeable and node.name not in spec.exclude
    ]
    allowed = [
        node
        for node in sources
        if next(allowed_sets(conditions, names, node.name), None) is not None
    ]
    return allowed or [node for node in sources if not barred(conditions, node.name)] or sources


def _may_yet(condition: RuleCondition, used: frozenset[str], left: Sequence[str]) -> bool:
    """Whether a set may meet a condition with nodes of `left` added."""
    if condition.is_monotone:
        return condition.holds(used)
    if condition.kind is ConditionKind.ALL_OR_NONE and not condition.nodes & used:
        return True
    return condition.holds(used | (condition.nodes & frozenset(left)))


def conflict(
    conditions: Sequence[RuleCondition],
    possible: Callable[[Sequence[RuleCondition]], bool],
    source: str,
    short: str = "",
) -> FailedPreconditionError | None:
    """The error that names rules which no placement meets together, as few that without any of them
    one does. None if there is no placement without rules. `possible` returns whether there is a
    placement under conditions, from `source`; `short` describes what the nodes lack that the rules
    allow."""
    if not possible(()):
        return None
    needed = conflicting(conditions, lambda some: not possible(some))
    together = " together" if len(needed) > 1 else ""
    lacking = f" (there {short})" if short else ""
    why = f"no placement from {source} meets {_quoted(needed)}{together}{lacking}"
    why += "; change or leave out one of the rules, or add a node"
    return FailedPreconditionError.about("rule", why, RULES_CONFLICT)


def _quoted(texts: Collection[str]) -> str:
    return " and ".join(f"'{text}'" for text in texts)
