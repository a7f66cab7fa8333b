"""The outputs that a head emitted for its requests, kept until the coordinator has their end.

The coordinator can leave and reconnect, or another can replace it. The head then sends again what
the coordinator lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import PromptLogprobs, Token
from edgeshard.domain.requests.head import (
    HeadEvent,
    HeldRequest,
    RequestAccepted,
    RequestEnd,
    StartRequest,
)

KEPT_S = 600.0
"""How long the outputs of an ended request are kept for a coordinator that is away."""
OVER_S, MOST_OVER = 180.0, 2048
"""How long, and for how many requests, the head remembers that the coordinator received a request's
end. Its client may still read when the coordinator is lost, and only the head can report to the
next one that the request was admitted."""


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One request and its emitted outputs. `followed`: whether further outputs go to the current
    stream."""

    start: StartRequest
    arrival: int
    followed: bool = True
    cancelled: bool = False
    """Before it was accepted: it ends as soon as it is."""
    accepted: RequestAccepted | None = None
    scores: list[PromptLogprobs] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    end: RequestEnd | EdgeShardError | None = None
    ended_at: float = 0.0

    @property
    def request_id(self) -> RequestId:
        return self.start.request_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.tokens)

    @property
    def scored(self) -> int:
        """The position after the last one whose prompt log-probability was sent, here or by another
        head."""
        return self.scores[-1].end if self.scores else self.start.scored

    @property
    def held(self) -> HeldRequest:
        """The request as it is reported to a coordinator."""
        start, tokens = self.start, max(len(self.tokens), len(self.start.emitted_tokens))
        return HeldRequest(
            start.request_id, start.instance, start.client, start.digest, tokens, self.scored
        )

    def has_all(self, emitted: tuple[int, ...], scored: int) -> bool:
        """Whether all outputs after these tokens, and from this position of the prompt, were or
        will be emitted."""
        return (
            self.token_ids[: len(emitted)] == emitted and self.start.scored <= scored <= self.scored
        )

    def events_behind(self, count: int, scored: int = 1) -> Iterator[HeadEvent]:
        """All emitted outputs, except the first `count` tokens and the prompt's log-probabilities
        before `scored`."""
        scores = (part.behind(scored) for part in self.scores)
        for event in (self.accepted, *scores, *self.tokens[count:], self.end):
            if event is not None:
                yield HeadEvent(self.request_id, event)


class Journal:
    """The requests of one head, in the order in which they came. `now` are seconds of a steady
    clock."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, JournalEntry] = {}
        self._over: OrderedDict[RequestId, tuple[HeldRequest, float]] = OrderedDict()
        self._arrivals = 0

    def find(self, request_id: RequestId) -> JournalEntry | None:
        return self._entries.get(request_id)

    def open(self, start: StartRequest, now: float) -> JournalEntry:
        """A new request. Those that have ended, and whose coordinator has stayed away for too long,
        are forgotten."""
        late = [
            key
            for key, entry in self._entries.items()
            if entry.end is not None and now > entry.ended_at + KEPT_S
        ]
        for request_id in late:
            del self._entries[request_id]
        self._over.pop(start.request_id, None)
        self._arrivals += 1
        entry = JournalEntry(start, self._arrivals)
        self._entries[start.request_id] = entry
        return entry

    def record(self, head_event: HeadEvent, now: float) -> bool:
        """Keep an event; return whether it goes to the stream. One of a request that is forgotten
        goes nowhere."""
        entry = self._entries.get(head_event.request_id)
        if entry is None or entry.end is not None:
            return False
        match head_event.event:
            case Token() as token:
                entry.tokens.append(token)
            case PromptLogprobs() as scores:
                entry.scores.append(scores)
            case RequestAccepted() as accepted:
                entry.accepted = accepted
            case RequestEnd() | EdgeShardError() as end:
                entry.end, entry.ended_at = end, now
        return entry.followed

    def forget(self, request_id: RequestId, now: float) -> None:
        """Nothing but that it was here is kept of a request."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._over[request_id] = replace(entry.held, over=True), now
        while len(self._over) > MOST_OVER or next(iter(self._over.values()))[1] + OVER_S < now:
            self._over.popitem(last=False)

    def stream_lost(self) -> None:
        """Hold events back from now on, until their requests are followed again."""
        for entry in self._entries.values():
            entry.followed = False

    def held(self, now: float) -> tuple[HeldRequest, ...]:
        """Requests that are here, followed by requests that are over."""
        over = [request for request, since in self._over.values() if since + OVER_S >= now]
        return (*(entry.held for entry in self._entries.values()), *over)

    def unfinished(self) -> list[JournalEntry]:
        """Requests that were accepted and have no end."""
        return [
            entry
            for entry in self._entries.values()
            if entry.accepted is not None and entry.end is None
        ]
