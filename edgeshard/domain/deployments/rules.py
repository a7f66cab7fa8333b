"""Rules of an operator: which nodes may, must or must not hold stages of a deployment together.

A `Rule` is an operator's text, by names and labels of nodes. `resolve` makes `RuleCondition`s of it
for the nodes of a site: the planner's input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import check_name
from edgeshard.domain.nodes.labels import check_key, check_labels

MOST_RULES = 64
WATTS_LABEL = "watts"
"""The label with a node's watts at work, used if no sensor has measured them."""
COST_LABEL = "cost_per_hour"
_TOLERANCE = 1e-9
"""The part of a limit by which a sum may be above it: figures are added in binary fractions."""


class RuleKind(StrEnum):
    TOGETHER = "together"
    """All of these nodes hold stages, or none; by a label: all nodes with stages have the same
    value."""
    APART = "apart"
    """At most one of these nodes holds a stage; by a label: no two nodes with stages have the same
    value."""
    USE = "use"
    """Each of these nodes holds a stage; of the nodes with a label at least one does."""
    AVOID = "avoid"
    """None of these nodes holds a stage."""
    AT_MOST = "at-most"
    """At most `limit` of these nodes hold stages."""
    MAX_WATTS = "max-watts"
    """The nodes with stages together take at most `limit` watts at work."""
    MAX_COST = "max-cost-per-hour"
    """The nodes with stages together cost at most `limit` an hour, by the label `cost_per_hour`."""


_GROUPING = (RuleKind.TOGETHER, RuleKind.APART)
_CAPS = (RuleKind.MAX_WATTS, RuleKind.MAX_COST)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `nodes` are names, or else `label` selects nodes: `KEY=VALUE`, or after "by" a
    `KEY`."""

    kind: RuleKind
    nodes: tuple[str, ...] = ()
    label: str = ""
    limit: float | None = None

    def __str__(self) -> str:
        """The one line that `parse_rule` reads."""
        limit = [] if self.limit is None else [f"{self.limit:.15g}"]
        limit += ["of"] if self.kind is RuleKind.AT_MOST else []
        by = ["by"] if self.label and self.kind in _GROUPING else []
        whom = [text for text in (self.label, ",".join(self.nodes)) if text]
        return " ".join([self.kind, *limit, *by, *whom])

    def among(self, names: Collection[str]) -> Rule | None:
        """The rule for only its nodes of these names; None if it names nodes and too few of them
        are left."""
        nodes = tuple(name for name in self.nodes if name in names)
        if len(nodes) == len(self.nodes):
            return self
        return (
            replace(self, nodes=nodes)
            if len(nodes) >= (2 if self.kind in _GROUPING else 1)
            else None
        )

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        self._check_limit()
        if self.kind in _CAPS:
            if self.nodes or self.label:
                raise _wrong("nodes", f"{self.kind} is about all nodes with stages; name none")
        elif bool(self.nodes) == bool(self.label):
            raise _wrong(
                "nodes",
                f"{self.kind} needs names of nodes, such as a,b, or a label, such as "
                f"{self._example}",
            )
        if self.label:
            self._check_label()
        for name in self.nodes:
            check_name(name, "nodes")
        if len(set(self.nodes)) < len(self.nodes):
            raise _wrong("nodes", "a node is named twice")
        if self.kind in _GROUPING and len(self.nodes) == 1:
            raise _wrong(
                "nodes", f"{self.kind} needs two nodes or more, or a label, such as {self._example}"
            )

    @property
    def _example(self) -> str:
        return "by zone" if self.kind in _GROUPING else "zone=hall1"

    def _check_limit(self) -> None:
        if self.kind is not RuleKind.AT_MOST and self.kind not in _CAPS:
            if self.limit is not None:
                raise _wrong("limit", f"{self.kind} takes no number")
        elif self.limit is None or not math.isfinite(self.limit) or self.limit <= 0:
            raise _wrong("limit", f"{self.kind} needs a number above 0")
        elif self.kind is RuleKind.AT_MOST and not self.limit.is_integer():
            raise _wrong("limit", f"at-most counts nodes: {self.limit:g} is not a whole number")

    def _check_label(self) -> None:
        key, equals, value = self.label.partition("=")
        if self.kind in _GROUPING:
            check_key(self.label, "label")
        elif equals:
            check_labels({key: value}, "label")
        else:
            raise _wrong("label", f"{self.label[:80]!r} is not KEY=VALUE, such as zone=hall1")


def _wrong(name: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError.about(name, why, "INVALID_RULE")


def parse_rule(text: str) -> Rule:
    """The rule of one line, such as `apart a,b`, `together by zone`, `use zone=hall1` or
    `at-most 2 of rack=r1`.

    Raises InvalidArgumentError naming what of it is at fault, a field of `Rule` or "rule".
    """
    words = [word for word in re.split(r"[,\s]+", text) if word]
    if not words or words[0] not in list(RuleKind):
        kinds = ", ".join(RuleKind)
        why = (
            f"{text[:80]!r} is not a rule; rules begin with {kinds}, such as 'apart a,b' or "
            "'at-most 2 of zone=hall1'"
        )
        raise InvalidArgumentError.about("rule", why, "INVALID_RULE")
    kind = RuleKind(words.pop(0))
    limit = _number_of(words, kind) if kind is RuleKind.AT_MOST or kind in _CAPS else None
    if words and words[0] == "of" and kind is RuleKind.AT_MOST:
        words = words[1:]
    if len(words) == 2 and words[0] == "by" and kind in _GROUPING:
        rule = Rule(kind, label=words[1], limit=limit)
    elif any("=" in word for word in words):
        if kind in _GROUPING:
            raise _wrong(
                "label",
                f"{kind} takes names of nodes, or the key of a label, such as {kind} by zone",
            )
        rule = Rule(kind, label=" ".join(words), limit=limit)
    else:
        rule = Rule(kind, tuple(words), limit=limit)
    rule.check()
    return rule


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of lines. Raises as `parse_rule`, naming `rule[i]`."""
    rules = []
    for index, text in enumerate(texts):
        try:
            rules.append(parse_rule(text))
        except InvalidArgumentError as error:
            raise error.within(f"rule[{index}]") from None
    return tuple(rules)


def _number_of(words: list[str], kind: RuleKind) -> float:
    """The number at the beginning of `words`, which is removed from them."""
    try:
        return float(words.pop(0))
    except (IndexError, ValueError):
        raise _wrong("limit", f"{kind} needs a number, such as {kind} 2") from None


class ConditionKind(StrEnum):
    AT_MOST = "at-most"
    """The sum of `weights` over the used nodes is at most `limit`."""
    AT_LEAST = "at-least"
    """At least `limit` of `nodes` are used."""
    ALL_OR_NONE = "all-or-none"
    """All of `nodes` are used, or none."""
    ONE_GROUP = "one-group"
    """All used nodes are of one of `groups`; a node of no group is not used."""


@dataclass(frozen=True, slots=True)
class RuleCondition:
    """A rule for the nodes of a site, by their names; a rule may be several. A node is used if it
    holds a stage.

    `text` names the rule for people: as it was written. If nodes lack a figure or a label, their
    names follow after a colon. Weights are above 0; a node without one weighs nothing.
    """

    text: str
    kind: ConditionKind
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    limit: float = 0.0
    nodes: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = ()

    def holds(self, used: Collection[str]) -> bool:
        if self.kind is ConditionKind.AT_MOST:
            return math.fsum(self.weights.get(name, 0.0) for name in used) <= self.limit * (
                1 + _TOLERANCE
            )
        if self.kind is ConditionKind.ONE_GROUP:
            return not used or any(group.issuperset(used) for group in self.groups)
        count = len(self.nodes.intersection(used))
        return (
            count >= self.limit
            if self.kind is ConditionKind.AT_LEAST
            else count in (0, len(self.nodes))
        )

    @property
    def is_monotone(self) -> bool:
        """Whether more nodes cannot mend a set that breaks it."""
        return self.kind in (ConditionKind.AT_MOST, ConditionKind.ONE_GROUP)


@dataclass(frozen=True, slots=True)
class RuledNode:
    """A node as rules see it: its name, its labels, and its watts at work, None if they are
    unmeasured."""

    name: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    busy_w: float | None = None


def resolve(rules: Sequence[Rule], nodes: Collection[RuledNode]) -> tuple[RuleCondition, ...]:
    """The conditions of rules for all nodes of a site, those that are away among them.

    A node without the label of a "by", or without the figure of a cap, is not used under that rule,
    because it might break it. Raises InvalidArgumentError naming `rule[i]` for a node, a key or a
    figure that no node has, and for a label that no node has and one must.
    """
    conditions: list[RuleCondition] = []
    for index, rule in enumerate(rules):
        try:
            rule.check()
            conditions += _conditions(rule, nodes)
        except InvalidArgumentError as error:
            raise error.within(f"rule[{index}]") from None
    return tuple(conditions)


def broken(conditions: Sequence[RuleCondition], used: Collection[str]) -> tuple[str, ...]:
    """The texts of the conditions that a set of used nodes breaks, each once."""
    return tuple(
        dict.fromkeys(condition.text for condition in conditions if not condition.holds(used))
    )


def conflicting(
    conditions: Sequence[RuleCondition], impossible: Callable[[Sequence[RuleCondition]], bool]
) -> tuple[str, ...]:
    """The texts of conditions that cannot hold together, a smallest set of them, if all cannot.

    `impossible` returns whether no plan keeps some of them.
    """
    texts = list(dict.fromkeys(condition.text for condition in conditions))
    for text in tuple(texts):
        fewer = [other for other in texts if other != text]
        if impossible([condition for condition in conditions if condition.text in fewer]):
            texts = fewer
    return tuple(texts)


def barred(conditions: Sequence[RuleCondition], name: str) -> bool:
    """Whether no set with this node meets the conditions."""
    return any(condition.is_monotone and not condition.holds((name,)) for condition in conditions)


def _conditions(rule: Rule, nodes: Collection[RuledNode]) -> Iterator[RuleCondition]:
    text = str(rule)
    if rule.kind in _CAPS:
        yield from _cap(rule, nodes)
    elif rule.kind in _GROUPING and rule.label:
        yield from _by_label(rule, nodes)
    elif rule.kind is RuleKind.TOGETHER:
        yield RuleCondition(text, ConditionKind.ALL_OR_NONE, nodes=_chosen(rule, nodes))
    elif rule.kind is RuleKind.USE:
        names = _chosen(rule, nodes)
        if not names:
            raise InvalidArgumentError.about(
                "label", f"no node has {rule.label}; {_remedy(rule.label)}", "UNKNOWN_LABEL"
            )
        yield RuleCondition(
            text, ConditionKind.AT_LEAST, limit=1 if rule.label else len(names), nodes=names
        )
    else:
        limit = {RuleKind.APART: 1.0, RuleKind.AVOID: 0.0}.get(rule.kind, rule.limit or 0.0)
        yield RuleCondition(
            text, ConditionKind.AT_MOST, dict.fromkeys(sorted(_chosen(rule, nodes)), 1.0), limit
        )


def _chosen(rule: Rule, nodes: Collection[RuledNode]) -> frozenset[str]:
    """The nodes that a rule names or that have its label."""
    names = [node.name for node in nodes]
    for name in rule.nodes:
        if name not in names:
            why = f"there is no node {name}; nodes are {', '.join(sorted(names)) or 'none'}"
            raise InvalidArgumentError.about("nodes", why, "UNKNOWN_NODE")
    if not rule.label:
        return frozenset(rule.nodes)
    key, _, value = rule.label.partition("=")
    _check_known(key, nodes)
    return frozenset(node.name for node in nodes if node.labels.get(key) == value)


def _check_known(key: str, nodes: Collection[RuledNode]) -> None:
    if not any(key in node.labels for node in nodes):
        why = f"no node has a label {key}; {_remedy(f'{key}=VALUE')}"
        raise InvalidArgumentError.about("label", why, "UNKNOWN_LABEL")


def _remedy(label: str) -> str:
    return f"`edgectl label node NAME {label}` gives it"


def _by_label(rule: Rule, nodes: Collection[RuledNode]) -> Iterator[RuleCondition]:
    key, text = rule.label, str(rule)
    _check_known(key, nodes)
    values = sorted({node.labels[key] for node in nodes if key in node.labels})
    groups = [
        frozenset(node.name for node in nodes if node.labels.get(key) == value) for value in values
    ]
    if rule.kind is RuleKind.TOGETHER:
        yield RuleCondition(text, ConditionKind.ONE_GROUP, groups=tuple(groups))
    else:
        for group in groups:
            yield RuleCondition(text, ConditionKind.AT_MOST, dict.fromkeys(sorted(group), 1.0), 1.0)
        yield from _unusable(
            text, f"has no label {key}", [node.name for node in nodes if key not in node.labels]
        )


def _cap(rule: Rule, nodes: Collection[RuledNode]) -> Iterator[RuleCondition]:
    is_watts, text = rule.kind is RuleKind.MAX_WATTS, str(rule)
    label = WATTS_LABEL if is_watts else COST_LABEL
    figures = {
        node.name: (node.busy_w if is_watts else None) or _number(node.labels.get(label))
        for node in nodes
    }
    known_figures = {name: figure for name, figure in figures.items() if figure is not None}
    if not known_figures:
        measured = "nobody measured the watts of a node, and " if is_watts else ""
        why = f"{measured}no node has a number as its label {label}; {_remedy(f'{label}=NUMBER')}"
        raise InvalidArgumentError.about("limit", why, "UNKNOWN_FIGURE")
    weights = {name: figure for name, figure in sorted(known_figures.items()) if figure > 0}
    yield RuleCondition(text, ConditionKind.AT_MOST, weights, rule.limit or 0.0)
    yield from _unusable(
        text, f"{label} is unknown", [name for name in figures if name not in known_figures]
    )


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _unusable(text: str, why: str, names: Sequence[str]) -> Iterator[RuleCondition]:
    if names:
        listed = sorted(names)
        yield RuleCondition(
            f"{text}: {why}: {', '.join(listed)}",
            ConditionKind.AT_MOST,
            dict.fromkeys(listed, 1.0),
            0.0,
        )
