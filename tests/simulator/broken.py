"""Cores that are broken on purpose: each is caught within 200 seeds, as
`python -m tests.simulator.broken` shows.

Each is the product with one thing wrong that somebody could write by mistake.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import edgeshard_coordinator.core.deployments.deployments
import edgeshard_coordinator.core.machine.reconcile
from edgeshard_agent.engine.journal import JournalEntry
from edgeshard_agent.engine.pipeline_head import Head
from edgeshard_agent.model.attention.kv import KvTable
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.net.attach import HeadStream
from edgeshard_agent.scheduler.forming import FormingStep
from edgeshard_agent.scheduler.scheduler import Scheduler
from edgeshard_coordinator.control.requests.head_reports import HeadReports
from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
from edgeshard_coordinator.control.services.admin_service import AdminServicer
from edgeshard_coordinator.core.values import authority
from edgeshard_coordinator.core.values.state import State

import tests.simulator.disk
from edgeshard.domain.control.commands import CommandKind
from edgeshard.domain.errors import AlreadyExistsError
from edgeshard.domain.ids import Epoch
from edgeshard.domain.requests.generation import Token
from edgeshard.domain.requests.head import HeadEvent, HeadEvents, StartRequest
from edgeshard.domain.requests.step import KvGrant, StepPlan
from tests.simulator.setup import collected, say, steady, work_alone

Broken = Callable[[], Any]
LIMIT = 200


def second_start_refused() -> Any:
    """A coordinator that reconnects for a request of the head gets an error that it exists."""
    start = Head.start

    def refusing(self: Head, request: StartRequest) -> None:
        if self._journal.find(request.request_id) is None:
            start(self, request)
        else:
            known = AlreadyExistsError("there is a request of this id", field="request_id")
            self._epoch.emit(HeadEvent(request.request_id, known))

    return mock.patch.object(Head, "start", refusing)


def last_token_torn_from_its_end() -> Any:
    """The last token is sent by itself, and the end after it."""

    def one_by_one(self: HeadStream) -> HeadEvents:
        return HeadEvents(self._epoch, (self._unsent.popleft(),))

    return mock.patch.object(HeadStream, "_take", one_by_one)


def empty_store_releases_live_stages() -> Any:
    """Stages that the disk does not know are taken for deleted."""
    module = edgeshard_coordinator.core.machine.reconcile
    unclaimed = module._unclaimed

    def all_orphans(state: Any, node: Any) -> Any:
        orphans, strangers = unclaimed(state, node)
        return (*orphans, *(held for held in strangers if held not in node.released)), ()

    return mock.patch.object(module, "_unclaimed", all_orphans)


def head_sends_before_it_has() -> Any:
    """Its outputs are sent to the coordinator first, and enter the journal a moment later."""

    def say(self: Head, *events: HeadEvent) -> None:
        for said in events:
            self._epoch.emit(said)
            asyncio.get_running_loop().call_soon(self._journal.record, said, self._now())

    return mock.patch.object(Head, "_say", say)


def token_taken_at_any_position() -> Any:
    """The next message of a head may be anything."""
    on_token = HeadReports._on_token

    def taking(
        self: HeadReports, attachment: Attachment, request: RunningRequest, token: Token
    ) -> bool:
        if request.next_position is not None:
            token = replace(token, position=request.next_position)
        return on_token(self, attachment, request, token)

    return mock.patch.object(HeadReports, "_on_token", taking)


def restart_gives_an_epoch_again() -> Any:
    """The disk is an epoch older than the nodes' commands."""
    restored = edgeshard_coordinator.core.deployments.deployments.restored_record

    def behind(record: Any) -> Any:
        back = restored(record)
        epoch = Epoch(max(1, back.epoch - 1))
        return replace(back, epoch=epoch, saved_epoch=epoch, adoptable=False)

    return mock.patch.object(tests.simulator.disk, "restored_record", behind)


def replay_counts_anew() -> Any:
    """The earlier outputs of a request count as its prompt."""
    submit = Scheduler.submit

    def counting(
        self: Scheduler,
        request_id: Any,
        generation: Any,
        prompt: Any,
        text: Any,
        emitted: Any = (),
        *rest: Any,
        **more: Any,
    ) -> Any:
        return submit(self, request_id, generation, [*prompt, *emitted], text, (), *rest, **more)

    return mock.patch.object(Scheduler, "submit", counting)


def acknowledged_before_it_is_on_disk() -> Any:
    """The operator's call returns as soon as the state has it."""

    async def at_once(self: AdminServicer, name: object, operation: object) -> None:
        return

    return mock.patch.object(AdminServicer, "_saved", at_once)


def head_goes_on_a_token_too_far() -> Any:
    """A coordinator that reconnects misses the first token after the ones that it has."""

    def follow(self: Head, entry: JournalEntry, start: StartRequest) -> None:
        for said in entry.events_behind(len(start.emitted_tokens) + 1, start.scored):
            self._epoch.emit(said)
        entry.followed = True

    return mock.patch.object(Head, "_follow", follow)


def swapped_request_comes_back_as_a_new_one() -> Any:
    """The stages grant it blocks and do not use the KV that they kept of it."""
    plan = FormingStep.plan

    def telling(
        self: FormingStep,
        frees: tuple[int, ...],
        swap_outs: tuple[int, ...] = (),
        swap_ins: tuple[KvGrant, ...] = (),
    ) -> StepPlan:
        return plan(
            self, frees, swap_outs, tuple(replace(grant, swapped=False) for grant in swap_ins)
        )

    return mock.patch.object(FormingStep, "plan", telling)


def saved_states_are_empty() -> Any:
    """A request that begins from saved states begins from its slot's former content."""
    return mock.patch.object(States, "copy", lambda self, source, target: None)


def slots_are_not_zeroed() -> Any:
    """A request starts from the states of the request that had its slot before."""
    return mock.patch.object(States, "clear", lambda self, slot: None)


def states_go_on_behind_wrong_guesses() -> Any:
    """A request starts from the states after its last guess, whether it was right or not."""
    slot_behind = KvTable.slot_behind
    return mock.patch.object(
        KvTable, "slot_behind", lambda self, position: slot_behind(self, self.length)
    )


def stage_fails_by_any_nodes_word() -> Any:
    """A status counts if its epoch is right, whichever node sends it."""

    def of_epoch(record: Any, node_id: object, status: Any) -> bool:
        return (status.deployment, status.epoch) == (record.name, record.epoch)

    return mock.patch.object(authority, "speaks_for_stage", of_epoch)


def command_is_answered_by_any_node() -> Any:
    """An answer counts if there is such a command."""

    def of_command(record: Any, node_id: object, key: Any) -> bool:
        is_of_stage = key.epoch == record.epoch and key.stage < len(record.placement.stages)
        return is_of_stage or key.kind is CommandKind.STANDBY

    return mock.patch.object(authority, "may_answer", of_command)


def epoch_is_taken_from_any_node() -> Any:
    """The next one is above all that nodes claim."""

    def above_claims(self: State, name: object, last: int) -> Epoch:
        stages = (stage for node in self.nodes.values() for stage in node.stages)
        return Epoch(
            max([last, *(stage.epoch for stage in stages if stage.deployment == name)]) + 1
        )

    return mock.patch.object(State, "epoch_after", above_claims)


ALL: dict[str, Broken] = {
    function.__name__: function
    for function in (
        second_start_refused,
        last_token_torn_from_its_end,
        empty_store_releases_live_stages,
        head_sends_before_it_has,
        token_taken_at_any_position,
        restart_gives_an_epoch_again,
        replay_counts_anew,
        acknowledged_before_it_is_on_disk,
        head_goes_on_a_token_too_far,
        swapped_request_comes_back_as_a_new_one,
        saved_states_are_empty,
        slots_are_not_zeroed,
        states_go_on_behind_wrong_guesses,
        stage_fails_by_any_nodes_word,
        command_is_answered_by_any_node,
        epoch_is_taken_from_any_node,
    )
}


@contextmanager
def breaking(name: str) -> Iterator[None]:
    with ALL[name]():
        yield


def first_caught(name: str, seeds: Sequence[int]) -> tuple[int, str] | None:
    """The first seed that notices, and its message."""
    with breaking(name):
        for outcome in collected(seeds):
            if outcome.violations:
                return outcome.seed, outcome.violations[0]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ALL), help="those to try")
    options = parser.parse_args()
    work_alone()
    all_caught = True
    for name in options.names:
        caught = first_caught(name, range(LIMIT))
        all_caught = all_caught and caught is not None
        seed, what = caught or (None, "")
        say(json.dumps({"core": name, "seed": seed, "caught": what}))
    return 0 if all_caught else 1


if __name__ == "__main__":
    steady("tests.simulator.broken")
    sys.exit(main())
