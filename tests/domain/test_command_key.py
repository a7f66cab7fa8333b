"""A command's key and its text: one form, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeshard.domain.control.commands import CommandKey, CommandKind
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import Epoch

WHOLE = st.integers(0, 2**64 - 1)


@given(
    st.text(min_size=1).filter(lambda text: "/" not in text),
    WHOLE,
    st.sampled_from(CommandKind),
    WHOLE,
)
def test_a_key_comes_back_from_its_text(
    uid: str, epoch: int, kind: CommandKind, stage: int
) -> None:
    key = CommandKey(uid, Epoch(epoch), kind, stage)
    assert CommandKey.parse(key.operation_id) == key


def test_its_text_is_what_nodes_have_always_been_sent() -> None:
    assert CommandKey("4f", Epoch(3), CommandKind.PREPARE, 1).operation_id == "4f/3/prepare/1"


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "a/1/prepare", "a/1/prepare/0/0", "/1/prepare/0", "a/1/Prepare/0", "a/1/stop/0",
        "a/-1/prepare/0", "a/1/prepare/", "a//prepare/0", "a/01/prepare/0", "a/1/prepare/x",
        "a/1/prepare/\u0663", "a/1/prepare/" + "9" * 21,
    ],
)  # fmt: skip
def test_any_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        CommandKey.parse(text)
    assert (refused.value.field, refused.value.reason) == ("operation_id", "INVALID_OPERATION_ID")
