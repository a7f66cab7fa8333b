"""Labels of nodes: keys and values set by operators, for the rules of deployments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from edgeshard.domain.errors import InvalidArgumentError

MOST_LABELS = 32
_WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_WORD_RULE = "1-63 letters, digits, '.', '_' or '-', beginning and ending with a letter or digit"


def check_key(text: str, field: str) -> str:
    """Return a valid key of a label; raises InvalidArgumentError naming `field`."""
    if not _WORD.fullmatch(text):
        raise InvalidArgumentError.about(
            field, f"{text[:80]!r} is not a label key: use {_WORD_RULE}", "INVALID_LABEL"
        )
    return text


def check_labels(labels: Mapping[str, str], field: str) -> Mapping[str, str]:
    """Return labels with valid keys and values, at most `MOST_LABELS`; raises InvalidArgumentError
    naming `field`."""
    if len(labels) > MOST_LABELS:
        why = f"a node has at most {MOST_LABELS} labels, not {len(labels)}"
        raise InvalidArgumentError.about(field, why, "TOO_MANY_LABELS")
    for key, value in labels.items():
        check_key(key, field)
        if not _WORD.fullmatch(value):
            raise _wrong(
                field, f"{value[:80]!r} is not a value of the label {key}: use {_WORD_RULE}"
            )
    return labels


def _wrong(field: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError.about(field, why, "INVALID_LABEL")


@dataclass(frozen=True, slots=True)
class LabelCall:
    """Labels to set on a node (its name or id), and keys of labels to remove."""

    node: str
    labels: Annotated[Mapping[str, str], check_labels]
    removed: tuple[str, ...] = ()

    def check(self) -> None:
        for key in self.removed:
            check_key(key, "removed")


def parse_labels(text: str, field: str = "labels") -> dict[str, str]:
    """The labels of a text such as `zone=hall1,gpu=yes`; an empty text has none.

    Raises InvalidArgumentError naming `field`, also for a key that is given twice.
    """
    labels, removed = parse_changes(
        [item.strip() for item in text.split(",") if item.strip()], field
    )
    if removed:
        raise InvalidArgumentError.about(
            field, f"{removed[0]}- has no value: write {removed[0]}=VALUE", "INVALID_LABEL"
        )
    return labels


def parse_changes(
    items: Sequence[str], field: str = "labels"
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The labels to set and the keys to remove, of `KEY=VALUE` and `KEY-`. Raises
    InvalidArgumentError naming `field`, also for a key that is given twice."""
    labels: dict[str, str] = {}
    removed: list[str] = []
    for item in items:
        key, equals, value = item.partition("=")
        if not equals and not item.endswith("-"):
            raise _wrong(field, f"{item[:80]!r} is not KEY=VALUE")
        key = key if equals else item[:-1]
        if key in labels or key in removed:
            raise _wrong(field, f"label {key[:80]} is given twice")
        if equals:
            labels[key] = value
        else:
            removed.append(check_key(key, field))
    check_labels(labels, field)
    return labels, tuple(removed)


def labels_text(labels: Mapping[str, str]) -> str:
    """`gpu=yes,zone=hall1`, in the order of the keys; "" for none."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))
