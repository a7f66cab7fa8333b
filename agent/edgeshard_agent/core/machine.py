"""The agent's state machine as a dump has it: the JSON of its state and events, and the pure step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from edgeshard.debugging.codec import Codec
from edgeshard.debugging.dump import StateMachine
from edgeshard.domain.control.commands import CommandResult
from edgeshard_agent.core.actions import SendResults
from edgeshard_agent.core.events import ActionStarted, Event
from edgeshard_agent.core.state import AgentState, apply
from edgeshard_agent.core.tracing import TraceEnded


@cache
def machine() -> StateMachine[AgentState, Event]:
    """Made at the first dump; nothing else needs it."""
    return StateMachine(Codec(AgentState), Codec(Event), apply)


def worth_keeping(event: Event) -> Event:
    """The event without large parts that do not change the state: the steps of a trace, which are sent at once."""
    if isinstance(event, TraceEnded) and event.trace is not None:
        return replace(event, trace=replace(event.trace, records=()))
    if isinstance(event, ActionStarted) and isinstance(event.action, SendResults):
        return ActionStarted(SendResults(tuple(_without_steps(result) for result in event.action.results)))
    return event


def _without_steps(result: CommandResult) -> CommandResult:
    return result if result.trace is None else replace(result, trace=replace(result.trace, records=()))
