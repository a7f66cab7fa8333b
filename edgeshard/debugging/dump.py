"""The document that one process writes of itself, and the replay of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edgeshard.debugging.codec import Codec
from edgeshard.debugging.ring import RingEntry, RingView
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import NodeName

StateT = TypeVar("StateT")
EventT = TypeVar("EventT")

DUMP_VERSION = 1


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """One process's dump, JSON text in UTF-8, or why there is none. `node` is empty for the
    coordinator."""

    node: NodeName
    text: bytes = b""
    failure: EdgeShardError | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of applying a dump's events to its checkpoint; `differs` names what differs from
    the dump."""

    events: int
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateMachine(Generic[StateT, EventT]):
    """A daemon's state machine: the forms of its states and events, and its pure step."""

    state: Codec[StateT]
    event: Codec[EventT]
    apply: Callable[[StateT, EventT], StateT]

    def document(self, state: StateT, ring: RingView[StateT, EventT]) -> dict[str, Any]:
        """State and ring as JSON types. Takes a while: not for the thread of the event loop."""
        return {
            "state": self.state.encode(state),
            "ring": {
                "recorded": ring.recorded,
                "earlier": [self._entry(entry) for entry in ring.earlier],
                "checkpoint": self.state.encode(ring.checkpoint),
                "entries": [self._entry(entry) for entry in ring.entries],
            },
        }

    def replay(self, document: Mapping[str, Any]) -> Replay:
        """Apply the ring's events to its checkpoint and compare with the state.

        Raises InvalidArgumentError for a document that this version does not read.
        """
        try:
            ring, dumped = document["ring"], document["state"]
            entries = [(item["number"], item["event"], item["refused"]) for item in ring["entries"]]
            state = self.state.decode(ring["checkpoint"])
        except (KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"the file is not a dump: {error} is missing or invalid"
            ) from None
        for number, plain, refused in entries:
            event = self.event.decode(plain)
            try:
                state = self.apply(state, event)
            except Exception as error:
                if refusal(error) != refused:
                    return Replay(
                        len(entries),
                        (f"event {number}: refused with {refusal(error)}, not {refused!r}",),
                    )
                continue
            if refused:
                return Replay(len(entries), (f"event {number}: taken, not refused with {refused}",))
        return Replay(len(entries), tuple(_differences(self.state.encode(state), dumped, "state")))

    def _entry(self, entry: RingEntry[EventT]) -> dict[str, Any]:
        return {
            "number": entry.number,
            "at": entry.at,
            "refused": entry.refused,
            "event": self.event.encode(entry.event),
        }


def to_text(document: Mapping[str, Any]) -> bytes:
    """JSON, made piece by piece: in one piece it would keep every other thread of the process
    waiting."""
    return "".join(json.JSONEncoder().iterencode(document)).encode()


def refusal(error: Exception) -> str:
    """Why an event changed nothing, for the ring: a typed error's reason, or the class of an error
    that is a bug."""
    return error.reason if isinstance(error, EdgeShardError) else type(error).__name__


def site_document(dumps: Sequence[ProcessDump], taken_at: str) -> dict[str, Any]:
    """One document of a site's dumps, the coordinator's first. `taken_at` is the date and time in
    words."""
    parts = {dump.node: _part(dump) for dump in dumps}
    return {
        "dump": DUMP_VERSION,
        "taken_at": taken_at,
        "coordinator": parts.pop(NodeName(""), {}),
        "nodes": parts,
    }


def site_parts(document: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The coordinator's part of a site's document, and the parts of the nodes that sent one, by
    name.

    Raises InvalidArgumentError for a document that is no dump, or of another version.
    """
    match document:
        case {"dump": version, "coordinator": dict(coordinator), "nodes": dict(nodes)} if (
            version == DUMP_VERSION
        ):
            return coordinator, {
                name: part
                for name, part in nodes.items()
                if isinstance(part, dict) and "failure" not in part
            }
        case _:
            raise InvalidArgumentError(
                f"the file is not a dump of version {DUMP_VERSION}", field="file", reason="NO_DUMP"
            )


def _part(dump: ProcessDump) -> dict[str, Any]:
    if dump.failure is not None:
        return {"failure": {"reason": dump.failure.reason, "message": dump.failure.message}}
    try:
        part = json.loads(dump.text)
    except (ValueError, RecursionError):
        part = None
    # One node that answers nonsense does not cost the dumps of the others.
    return (
        part
        if isinstance(part, dict)
        else {"failure": {"reason": "NOT_JSON", "message": "its dump is not a JSON object"}}
    )


def _differences(replayed: Any, dumped: Any, path: str) -> list[str]:
    """Paths at which two JSON values are not equal."""
    if replayed == dumped:
        return []
    if isinstance(replayed, dict) and isinstance(dumped, dict) and replayed.keys() == dumped.keys():
        return [
            difference
            for key in replayed
            for difference in _differences(replayed[key], dumped[key], f"{path}.{key}")
        ]
    if isinstance(replayed, list) and isinstance(dumped, list) and len(replayed) == len(dumped):
        pairs = enumerate(zip(replayed, dumped, strict=True))
        return [
            difference
            for index, (a, b) in pairs
            for difference in _differences(a, b, f"{path}[{index}]")
        ]
    return [path]
