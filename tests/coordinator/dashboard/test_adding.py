"""Additions of models by operators: rights are checked after the last wait, and the audit log has
each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.additions.addition_state import NO_ADDITIONS, Addition, Phase
from edgeshard_coordinator.dashboard.operator import ADD, CANCEL, OperatorAdding, OperatorAdditions

from edgeshard.domain.audit import BEGUN, OK
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError, UnauthenticatedError
from edgeshard.importing.model_sources import Source
from edgeshard.rpc.access import CallFrom

WHO = "operator/ann"
SOURCE = CallFrom("10.0.0.7:1", None, True)


class Adder:
    """An adder that converts nothing; with `revoked` its operator is revoked while a model is
    checked."""

    def __init__(self) -> None:
        self.state = NO_ADDITIONS
        self.on_end: Any = None
        self.is_allowed = True
        self.revoked = False
        self.error: InvalidArgumentError | None = None

    def check(self) -> None:
        if not self.is_allowed:
            raise UnauthenticatedError("revoked", reason="NO_SESSION")

    async def models(self) -> list[Any]:
        self.is_allowed = not self.revoked
        return []

    async def checked(self, source: str, name: str, width: str) -> tuple[Source, str]:
        self.is_allowed = not self.revoked
        if self.error is not None:
            raise self.error
        return Source(path=Path(source)), name

    def queue(self, source: Source, name: str, width: str, who: str) -> Addition:
        self.state = self.state.queued(str(source.path), name, width, who)
        return self.state.get(self.state.last)

    async def cancel(self, number: int) -> Addition:
        self.end(number, Phase.CANCELLED)
        return self.state.get(number)

    def end(self, number: int, *phases: Phase, **changes: Any) -> None:
        for phase in phases:
            self.state = self.state.moved(number, phase, **changes)
        self.on_end(self.state.get(number))


class Audit:
    def __init__(self) -> None:
        self.entries: list[tuple[str, str, str]] = []

    def note(self, source: CallFrom, what: str, target: str, result: str = OK) -> None:
        assert source is SOURCE
        self.entries.append((what, target, result))


def operator() -> tuple[OperatorAdding, Adder, Audit]:
    adder: Any = Adder()
    audit: Any = Audit()
    return OperatorAdditions(adder, audit).by(SOURCE, WHO, adder.check), adder, audit


async def test_an_addition_has_an_entry_when_it_begins_and_one_when_it_ends() -> None:
    adding, adder, audit = operator()
    first = await adding.add("/models/a", "a", "int8")
    second = await adding.add("/models/b", "b", "int8")
    third = await adding.add("/models/c", "c", "int8")
    adder.end(first.number, Phase.CONVERTING, Phase.STORING, Phase.DONE)
    adder.end(
        second.number,
        Phase.CONVERTING,
        Phase.FAILED,
        error=InvalidArgumentError("wrong", reason="TRUNCATED"),
    )
    await adding.cancel(third.number)
    assert audit.entries == [
        (ADD, "a", BEGUN),
        (ADD, "b", BEGUN),
        (ADD, "c", BEGUN),
        (ADD, "a", OK),
        (ADD, "b", "TRUNCATED"),
        (CANCEL, "c", OK),
        (ADD, "c", "CANCELLED"),
    ]


async def test_an_operator_who_is_revoked_while_a_model_is_checked_adds_nothing() -> None:
    adding, adder, audit = operator()
    adder.revoked = True
    with pytest.raises(UnauthenticatedError):
        await adding.add("/models/a", "a", "int8")
    assert adder.state == NO_ADDITIONS and audit.entries == [(ADD, "a", "NO_SESSION")]
    adder.is_allowed = True
    with pytest.raises(UnauthenticatedError):
        await adding.models()


async def test_a_revoked_operator_cancels_nothing() -> None:
    adding, adder, audit = operator()
    addition = await adding.add("/models/a", "a", "int8")
    adder.is_allowed = False
    with pytest.raises(UnauthenticatedError):
        await adding.cancel(addition.number)
    assert not adder.state.get(addition.number).has_ended
    assert audit.entries[-1] == (CANCEL, str(addition.number), "NO_SESSION")


async def test_what_is_refused_has_an_entry_with_the_reason() -> None:
    adding, adder, audit = operator()
    adder.error = InvalidArgumentError("outside", field="source", reason="OUTSIDE_FOLDERS")
    with pytest.raises(InvalidArgumentError):
        await adding.add("/etc", "", "int8")
    with pytest.raises(NotFoundError):
        await adding.cancel(7)
    assert audit.entries == [(ADD, "/etc", "OUTSIDE_FOLDERS"), (CANCEL, "7", "NOT_FOUND")]
