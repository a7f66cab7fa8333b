"""The step that the head's scheduler is forming. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from edgeshard.domain.deployments.step_cost import Piece
from edgeshard.domain.requests.generation import text_bytes
from edgeshard.domain.requests.step import KvGrant, Span, StateCopy, StepPlan
from edgeshard_agent.scheduler.drafting import DraftAsk
from edgeshard_agent.scheduler.scoring import targets_of
from edgeshard_agent.scheduler.sequence import Sequence

MOST_SEEN_TOKENS = 1 << 18
"""Limit for all requests that one step introduces, unless it introduces only one: they travel in
one frame's header, which takes 4 MiB. A vocabulary has hardly more."""
_TOKEN_BYTES = 5
_BIAS_TOKENS = 3
"""A bias takes as many bytes as this number of tokens."""
_UNKNOWN = 0
"""In place of a guess that the draft is yet to make."""


@dataclass(slots=True)
class FormingStep:
    """Spans and grants so far, and the token ids that the first stage embeds.

    `saves` are of states as the steps before leave them.
    """

    saves: tuple[StateCopy, ...] = ()
    spans: list[Span] = field(default_factory=list)
    grants: list[KvGrant] = field(default_factory=list)
    restores: list[StateCopy] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    asks: list[DraftAsk] = field(default_factory=list)
    seen_count: int = 0
    """Tokens sent to the stages because a penalty counts them or a guide has led to them; includes
    its text and biases of tokens.
    """
    is_alone: bool = False
    """Whether it contains only one decoding request, and no other request needs its rows."""

    @property
    def pieces(self) -> list[Piece]:
        return [(span.first_position, span.token_count) for span in self.spans]

    def has_room_for_seen(self, sequence: Sequence) -> bool:
        """Whether the data for a request's penalties and its guide fits into this step, too."""
        more = _most_told(sequence)
        return not (self.seen_count and more) or self.seen_count + more <= MOST_SEEN_TOKENS

    def add(
        self,
        sequence: Sequence,
        end: int,
        grant: KvGrant | None,
        restore: StateCopy | None = None,
        guesses: tuple[int, ...] = (),
        ask: DraftAsk | None = None,
    ) -> None:
        """Schedule a request's positions up to `end`, then its guesses, or the number of guesses
        requested from the draft; `grant` is the blocks it lacked for them, and `restore` the saved
        states it begins from."""
        first = sequence.scheduled
        is_new, generation = not sequence.introduced, sequence.generation
        seen_tokens = _seen_tokens(sequence) if is_new else ()
        self.seen_count += len(seen_tokens) + _told(sequence)
        if ask is not None:
            self.asks.append(ask)
            guesses = (_UNKNOWN,) * ask.most
        if sequence.shared is not None:
            self.grants.append(sequence.shared)
            sequence.shared = None
        if grant is not None:
            self.grants.append(grant)
        if restore is not None:
            self.restores.append(restore)
        self.spans.append(
            Span(
                request=sequence.number,
                first_position=first,
                token_count=end - first + len(guesses),
                sample=end == len(sequence.tokens) and generation.max_new_tokens > 0,
                sampling=generation.sampling if is_new else None,
                seen_tokens=seen_tokens,
                guide=generation.guide if is_new else None,
                answer_tokens=_answer_tokens(sequence) if is_new else (),
                party=_party(sequence.client) if is_new and generation.guide is not None else 0,
                targets=targets_of(sequence, first, end),
                guesses=len(guesses),
            )
        )
        self.tokens += (*sequence.tokens[first:end], *guesses)
        sequence.introduced = True
        sequence.certain = end
        sequence.scheduled = end + len(guesses)
        sequence.assumed = len(guesses)

    def plan(
        self,
        frees: tuple[int, ...],
        swap_outs: tuple[int, ...] = (),
        swap_ins: tuple[KvGrant, ...] = (),
    ) -> StepPlan:
        return StepPlan(
            frees,
            (*swap_ins, *self.grants),
            tuple(self.spans),
            swap_outs=swap_outs,
            saves=self.saves,
            restores=tuple(self.restores),
        )


def _most_told(sequence: Sequence) -> int:
    """The most tokens that will be sent to the stages. They are sent once."""
    if sequence.introduced:
        return 0
    penalised = sequence.generation.sampling.repetition_penalty != 1.0
    return (len(sequence.tokens) if penalised else 0) + _told(sequence)


def _told(sequence: Sequence) -> int:
    """The size of the data sent to the stages besides seen tokens, in tokens."""
    if sequence.introduced:
        return 0
    generation = sequence.generation
    guide = 0 if generation.guide is None else text_bytes(generation.guide.text) // _TOKEN_BYTES
    biases = _BIAS_TOKENS * len(generation.sampling.logit_bias)
    return len(_answer_tokens(sequence)) + guide + biases


def _seen_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Tokens that a repetition penalty counts as seen; the last stage adds the tokens it
    samples."""
    if sequence.generation.sampling.repetition_penalty == 1.0:
        return ()
    return tuple(sorted(set(sequence.tokens)))


def _answer_tokens(sequence: Sequence) -> tuple[int, ...]:
    """The answer so far, if a guide continues from it or a penalty counts it; the last stage adds
    the tokens it samples.
    """
    generation = sequence.generation
    if generation.guide is None and not generation.sampling.counts_answer:
        return ()
    return tuple(sequence.tokens[sequence.prompt_count :])


def _party(client: str) -> int:
    """A number for a client that reveals nothing about it, and is not 0."""
    return int.from_bytes(hashlib.sha256(client.encode()).digest()[:8], "little") | 1
