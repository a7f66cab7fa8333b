"""The step that the head's scheduler is forming. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeshard.domain.step import KvGrant, Span, StepPlan
from edgeshard.domain.step_cost import Piece
from edgeshard_agent.scheduler.sequence import Sequence

MOST_SEEN_TOKENS = 1 << 18
"""Of all requests that one step introduces, unless it introduces one alone: they travel in one frame's header, which
takes 4 MiB. A vocabulary has hardly more."""


@dataclass(slots=True)
class Draft:
    """Spans and grants so far, and the token ids that the first stage embeds."""

    spans: list[Span] = field(default_factory=list)
    grants: list[KvGrant] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seen_count: int = 0
    """Tokens that the stages are told a repetition penalty counts as seen."""

    @property
    def pieces(self) -> list[Piece]:
        return [(span.first_position, span.token_count) for span in self.spans]

    def has_room_for_seen(self, sequence: Sequence) -> bool:
        """Whether the tokens that a request's repetition penalty counts as seen can go with this step too."""
        more = _most_seen(sequence)
        return not (self.seen_count and more) or self.seen_count + more <= MOST_SEEN_TOKENS

    def add(self, sequence: Sequence, end: int, grant: KvGrant | None) -> None:
        """Schedule a request's positions up to `end`; `grant` is the blocks it lacked for them."""
        first = sequence.scheduled
        seen = _seen_tokens(sequence) if _most_seen(sequence) else ()
        self.seen_count += len(seen)
        if sequence.shared is not None:
            self.grants.append(sequence.shared)
            sequence.shared = None
        if grant is not None:
            self.grants.append(grant)
        self.spans.append(
            Span(
                request=sequence.number,
                first_position=first,
                token_count=end - first,
                sample=end == len(sequence.tokens),
                sampling=None if sequence.introduced else sequence.generation.sampling,
                seen_tokens=seen,
            )
        )
        self.tokens += sequence.tokens[first:end]
        sequence.introduced = True
        sequence.scheduled = end

    def plan(self, frees: tuple[int, ...]) -> StepPlan:
        return StepPlan(frees, tuple(self.grants), tuple(self.spans))


def _most_seen(sequence: Sequence) -> int:
    """How many the stages will be told of at most. They are told once."""
    penalised = sequence.generation.sampling.repetition_penalty != 1.0
    return len(sequence.tokens) if penalised and not sequence.introduced else 0


def _seen_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Tokens that a repetition penalty counts as seen; the last stage adds the tokens it samples."""
    return tuple(sorted(set(sequence.tokens)))
