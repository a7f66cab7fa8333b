"""Labels of nodes as texts."""

from __future__ import annotations

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.labels import (
    MOST_LABELS,
    check_labels,
    labels_text,
    parse_changes,
    parse_labels,
)


def test_labels_are_read_as_they_are_written() -> None:
    labels = parse_labels("zone=hall1, gpu=yes,")
    assert labels == {"zone": "hall1", "gpu": "yes"} and parse_labels("") == {}
    assert (
        labels_text(labels) == "gpu=yes,zone=hall1" and parse_labels(labels_text(labels)) == labels
    )


def test_changes_set_and_remove() -> None:
    given, removed = parse_changes(["zone=hall2", "gpu-", "cost_per_hour=0.5"])
    assert removed == ("gpu",) and given == {"zone": "hall2", "cost_per_hour": "0.5"}


@pytest.mark.parametrize(
    "text",
    [
        "zone",
        "zone-",
        "=a",
        "zone=",
        "zone=a b",
        "zo/ne=a",
        "zone=a,zone=b",
        "zone=\x1b[31m",
        "a" * 64 + "=b",
    ],
)
def test_what_is_no_label_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse_labels(text, "labels")
    assert refused.value.field == "labels"


def test_a_key_is_not_given_and_removed_at_once() -> None:
    for items in (["zone=a", "zone-"], ["zone-", "zone-"], ["zo/ne-"]):
        with pytest.raises(InvalidArgumentError):
            parse_changes(items)


def test_a_node_has_no_more_labels_than_the_limit() -> None:
    with pytest.raises(InvalidArgumentError):
        check_labels({f"k{number}": "v" for number in range(MOST_LABELS + 1)}, "labels")
