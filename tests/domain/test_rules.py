"""Rules of an operator: their texts, and the conditions that they are for a site's nodes."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.deployments.rules import (
    Rule,
    RuleCondition,
    RuledNode,
    RuleKind,
    barred,
    broken,
    parse_rule,
    resolve,
)
from edgeshard.domain.errors import InvalidArgumentError

NODES = (
    RuledNode("a", {"zone": "hall1", "gpu": "yes", "cost_per_hour": "0.1"}, 100.0),
    RuledNode("b", {"zone": "hall1", "cost_per_hour": "0.1", "watts": "50"}),
    RuledNode("c", {"zone": "hall2", "cost_per_hour": "0.1"}, 30.0),
    RuledNode("d", {"cost_per_hour": "much"}),
)
SETS = [set(chosen) for count in range(5) for chosen in itertools.combinations("abcd", count)]


def allowed(*texts: str) -> list[str]:
    """The sets of nodes that rules allow, each as a word."""
    conditions = resolve([parse_rule(text) for text in texts], NODES)
    return ["".join(sorted(used)) for used in SETS if not broken(conditions, used)]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("together a,b", lambda used: len(used & {"a", "b"}) != 1),
        ("together by zone", lambda used: used <= {"a", "b"} or used <= {"c"}),
        ("apart a,c", lambda used: not used >= {"a", "c"}),
        ("apart by zone", lambda used: not used >= {"a", "b"} and "d" not in used),
        ("use a,c", lambda used: used >= {"a", "c"}),
        ("use zone=hall1", lambda used: bool(used & {"a", "b"})),
        ("avoid a,c", lambda used: not used & {"a", "c"}),
        ("avoid zone=hall1", lambda used: not used & {"a", "b"}),
        ("avoid zone=hall9", lambda used: True),
        ("at-most 1 of a,b,c", lambda used: len(used & set("abc")) <= 1),
        ("at-most 1 of zone=hall1", lambda used: not used >= {"a", "b"}),
        (
            "max-watts 150",
            lambda used: sum({"a": 100, "b": 50, "c": 30, "d": 999}[name] for name in used) <= 150,
        ),
        ("max-cost-per-hour 0.3", lambda used: "d" not in used),
        ("max-cost-per-hour 0.25", lambda used: "d" not in used and len(used) <= 2),
    ],
)
def test_each_rule_allows_the_sets_that_its_words_say(text: str, meant: object) -> None:
    assert callable(meant)
    assert allowed(text) == ["".join(sorted(used)) for used in SETS if meant(used)]


def test_rules_are_read_as_they_are_written() -> None:
    for text in (
        "together a,b",
        "apart by zone",
        "use zone=hall1",
        "at-most 2 of a,b,c",
        "max-cost-per-hour 2.5",
    ):
        assert str(parse_rule(text)) == text
    assert parse_rule(" at-most  2 zone=hall1 ") == Rule(
        RuleKind.AT_MOST, label="zone=hall1", limit=2
    )
    assert parse_rule("apart a, b") == parse_rule("apart a b") == Rule(RuleKind.APART, ("a", "b"))
    assert parse_rule("avoid 7") == Rule(RuleKind.AVOID, ("7",))


names = st.lists(st.sampled_from(["a", "b", "c", "7", "of", "by"]), min_size=2, unique=True).map(
    tuple
)
labels = st.sampled_from(["zone=hall1", "rack=of", "n=2"])
made_rules = st.one_of(
    st.builds(Rule, st.sampled_from([RuleKind.USE, RuleKind.AVOID]), names),
    st.builds(Rule, st.sampled_from([RuleKind.USE, RuleKind.AVOID]), label=labels),
    st.builds(
        Rule,
        st.sampled_from([RuleKind.TOGETHER, RuleKind.APART]),
        label=st.sampled_from(["zone", "by", "2"]),
    ),
    st.builds(Rule, st.just(RuleKind.AT_MOST), label=labels, limit=st.integers(1, 99).map(float)),
    st.builds(
        Rule, st.sampled_from([RuleKind.MAX_WATTS, RuleKind.MAX_COST]), limit=st.floats(0.01, 1e6)
    ),
)


@given(made_rules)
def test_a_rules_line_is_read_as_that_rule(rule: Rule) -> None:
    again = parse_rule(str(rule))
    assert (again.kind, again.nodes, again.label) == (rule.kind, rule.nodes, rule.label)
    assert again.limit == (None if rule.limit is None else pytest.approx(rule.limit, rel=1e-14))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "rule"),
        ("never a", "rule"),
        ("together", "nodes"),
        ("together a", "nodes"),
        ("together zone=hall1", "label"),
        ("together by", "nodes"),
        ("apart by zo/ne", "label"),
        ("use by zone", ""),
        ("use", "nodes"),
        ("use a,a", "nodes"),
        ("use A", "nodes"),
        ("use zone=", "label"),
        ("avoid zone=a gpu=no", "label"),
        ("at-most zone=hall1", "limit"),
        ("at-most 0 of a,b", "limit"),
        ("at-most 1.5 of a,b", "limit"),
        ("at-most nan of a,b", "limit"),
        ("max-watts", "limit"),
        ("max-watts -3", "limit"),
        ("max-watts 3 of a", "nodes"),
        ("max-cost-per-hour inf", "limit"),
    ],
)
def test_what_is_no_rule_is_refused_by_the_word_at_fault(text: str, field: str) -> None:
    if not field:  # "by" may be the name of a node
        assert parse_rule(text).nodes == ("by", "zone")
        return
    with pytest.raises(InvalidArgumentError) as refused:
        parse_rule(text)
    assert refused.value.field == field


def test_a_rule_made_otherwise_is_checked_too() -> None:
    wrong = [
        Rule(RuleKind.USE, ("a",), "zone=a"),
        Rule(RuleKind.USE, ("a",), limit=2),
        Rule(RuleKind.AVOID),
    ]
    for rule in wrong:
        with pytest.raises(InvalidArgumentError):
            resolve([rule], NODES)


@pytest.mark.parametrize(
    ("text", "field", "named"),
    [
        ("apart a,e", "rule[1].nodes", "no node e"),
        ("together by rack", "rule[1].label", "label rack"),
        ("avoid rack=r1", "rule[1].label", "label rack"),
        ("use zone=hall9", "rule[1].label", "zone=hall9"),
    ],
)
def test_a_name_or_a_label_that_nothing_has_is_named_with_its_rule(
    text: str, field: str, named: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        resolve([parse_rule("avoid d"), parse_rule(text)], NODES)
    assert refused.value.field == field and named in refused.value.message
    assert "avoid d" not in refused.value.message


def test_a_cap_needs_a_node_with_figures_and_excludes_nodes_without_them() -> None:
    bare = [RuledNode("a"), RuledNode("b")]
    for text in ("max-watts 9", "max-cost-per-hour 9"):
        with pytest.raises(InvalidArgumentError) as refused:
            resolve([parse_rule(text)], bare)
        assert refused.value.field == "rule[0].limit" and "label node" in refused.value.message
    conditions = resolve([parse_rule("max-watts 500")], NODES)
    assert broken(conditions, {"a", "d"}) == ("max-watts 500: watts is unknown: d",)
    assert (
        broken(conditions, {"a", "b"}) == ()
        and barred(conditions, "d")
        and not barred(conditions, "a")
    )


def test_a_sum_in_binary_fractions_is_not_above_its_limit() -> None:
    assert "abc" in allowed("max-cost-per-hour 0.3")


def rules_of_sets() -> st.SearchStrategy[list[Rule]]:
    parts = [
        "together a,b",
        "apart a,c",
        "use b,d",
        "avoid d",
        "at-most 2 of a,b,c",
        "apart by zone",
        "use zone=hall1",
    ]
    return st.lists(st.sampled_from(parts).map(parse_rule), max_size=4)


@given(rules_of_sets(), st.sets(st.sampled_from("abcd")), st.sampled_from("abcd"))
def test_more_nodes_never_mend_a_monotone_condition_and_barred_nodes_are_in_no_allowed_set(
    rules: list[Rule], used: Collection[str], more: str
) -> None:
    conditions: tuple[RuleCondition, ...] = resolve(rules, NODES)
    for condition in conditions:
        if condition.is_monotone and not condition.holds(used):
            assert not condition.holds({*used, more})
    if barred(conditions, more):
        assert broken(conditions, {*used, more})
