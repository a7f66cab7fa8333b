"""The coordinator's state machine for dumps: the JSON of its state and events, and the pure step."""

from __future__ import annotations

from functools import cache

from edgeshard.debugging.codec import Codec
from edgeshard.debugging.dump import StateMachine
from edgeshard_coordinator.core.machine.apply import apply
from edgeshard_coordinator.core.values.events import Event
from edgeshard_coordinator.core.values.state import State


@cache
def machine() -> StateMachine[State, Event]:
    """Made at the first dump; nothing else needs it."""
    return StateMachine(Codec(State), Codec(Event), apply)
