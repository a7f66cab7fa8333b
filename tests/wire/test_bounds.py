"""Each text, list and figure that a node may send has a bound in its type, however deep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from edgeshard.domain.checks import at_most, checks_of
from edgeshard.domain.control.commands import AgentMessage, ProfileReport, Registration
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Figure, Text, cut_text
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.kernels import KernelSpeed
from edgeshard.domain.requests.generation import PROMPT_LIMIT_TOKENS, PROMPT_LOGPROBS_POSITIONS
from edgeshard.domain.requests.head import HeadHello
from edgeshard.domain.requests.trace import ReadRecord, StepRecord
from edgeshard.proto.v1 import common_pb2, head_pb2
from edgeshard.wire.generation import MAX_TIMINGS, MAX_TOP
from edgeshard.wire.head_stream import MAX_TOKEN_PARTS, MAX_TOKENS, head_message_from_wire

BY_THEIR_CLASS = {
    DeviceFacts: "`check_told` looks at its texts",
    KernelSpeed: "`DeviceFacts.check_told` looks at its texts",
    StepRecord: "`check` looks at its times",
    ReadRecord: "`check` looks at its times",
}
"""Classes with a check of their own in place of checks of their fields."""


def unbounded(kind: Any, walked: set[Any]) -> Iterator[str]:
    """The fields of a class, and of all within it, that have a type without a bound."""
    if kind in walked:
        return
    walked.add(kind)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield from _of_field(kind, name, hint, False, walked)


def _of_field(kind: Any, name: str, hint: Any, is_checked: bool, walked: set[Any]) -> Iterator[str]:
    inner, checks = checks_of(hint)
    is_checked = is_checked or bool(checks) or (kind in BY_THEIR_CLASS and inner in (str, float))
    origin, parts = get_origin(inner), get_args(inner)
    if is_dataclass(inner):
        yield from unbounded(inner, walked)
    elif origin in (Union, UnionType):
        for part in parts:
            if part is not NoneType:
                yield from _of_field(kind, name, part, is_checked, walked)
    elif origin is tuple or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not is_checked:
            yield f"{kind.__name__}.{name} is of any length"
        for part in parts if origin is tuple else ():
            if part is not Ellipsis:
                yield from _of_field(kind, name, part, False, walked)
    elif inner in (str, bytes, float) and not is_checked:
        yield f"{kind.__name__}.{name} is any {inner.__name__}"


@pytest.mark.parametrize("kind", [Registration, ProfileReport, HeadHello, *get_args(AgentMessage)])
def test_all_that_an_agent_sends_has_bounds(kind: Any) -> None:
    assert not list(unbounded(kind, set()))


@dataclass
class _Within:
    text: str


@dataclass
class _Loose:
    text: str
    cut: Text
    figure: float
    finite: Figure
    items: tuple[_Within, ...]
    few: Annotated[tuple[str, ...], at_most(3)]
    data: bytes | None = None


def test_a_type_without_a_bound_is_refused() -> None:
    assert list(unbounded(_Loose, set())) == [
        "_Loose.text is any str",
        "_Loose.figure is any float",
        "_Loose.items is of any length",
        "_Within.text is any str",
        "_Loose.few is any str",
        "_Loose.data is any bytes",
    ]


TOKEN = {"request_id": "r"}
TIMINGS = [common_pb2.StageTiming()]
ENTRIES = [common_pb2.TokenLogprob()]
TOO_MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": ("tokens", {"tokens": [TOKEN] * (MAX_TOKENS + 1)}),
    "tokens.timings": (
        "tokens",
        {"tokens": [{"timings": TIMINGS * 1000}] * (1 + MAX_TOKEN_PARTS // 1000)},
    ),
    "timings": ("token", {"timings": TIMINGS * (MAX_TIMINGS + 1)}),
    "top": ("token", {"top": ENTRIES * (MAX_TOP + 1)}),
    "prompt_tokens": ("accepted", {"prompt_tokens": [1] * (PROMPT_LIMIT_TOKENS + 1)}),
    "logprobs": (
        "prompt_logprobs",
        {"prompt_logprobs": {"logprobs": [0.5] * (PROMPT_LOGPROBS_POSITIONS + 1)}},
    ),
    "top_tokens": (
        "prompt_logprobs",
        {"prompt_logprobs": {"logprobs": [0.5], "top_tokens": [1] * (MAX_TOP + 1)}},
    ),
}
"""A message with a list that is too long, by the list's field."""


@pytest.mark.parametrize("field", TOO_MANY)
def test_a_list_of_a_head_has_a_bound(field: str) -> None:
    kind, values = TOO_MANY[field]
    with pytest.raises(InvalidArgumentError) as refused:
        head_message_from_wire(head_pb2.AttachRequest(**{kind: values}))
    assert refused.value.field == field


def test_a_text_of_characters_to_escape_is_cheap() -> None:
    """One message has many texts, so only the first of these characters are shown."""
    assert cut_text("\x1b" * 300, "") == "\\x1b" * 4
    assert cut_text("a\x1bb\n", "") == "a\\x1bb\\x0a"
