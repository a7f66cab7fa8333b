"""The step that the head's scheduler is forming. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeshard.domain.step import KvGrant, Span, StepPlan
from edgeshard.domain.step_cost import Piece
from edgeshard_agent.scheduler.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """Spans and grants so far, and the token ids that the first stage embeds."""

    spans: list[Span] = field(default_factory=list)
    grants: list[KvGrant] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return [(span.first_position, span.token_count) for span in self.spans]

    def add(self, sequence: Sequence, end: int, grant: KvGrant | None) -> None:
        """Schedule a request's positions up to `end`; `grant` is the blocks it lacked for them."""
        first = sequence.scheduled
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
                seen_tokens=() if sequence.introduced else _seen_tokens(sequence),
            )
        )
        self.tokens += sequence.tokens[first:end]
        sequence.introduced = True
        sequence.scheduled = end

    def plan(self, frees: tuple[int, ...]) -> StepPlan:
        return StepPlan(frees, tuple(self.grants), tuple(self.spans))


def _seen_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Tokens that a repetition penalty counts as seen; the last stage adds the tokens it samples."""
    if sequence.generation.sampling.repetition_penalty == 1.0:
        return ()
    return tuple(sorted(set(sequence.tokens)))
