"""Compares a client's stream with the stream of an undisturbed run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    Started,
    Token,
)


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed answer to a request: `text` is the whole text, including the part that was
    held back until the end. `logprobs` are 0 if they were not requested."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problems` is empty for a stream that is as it should be. `wrong_tokens` counts tokens that
    are not the reference's: changed, repeated, or beyond its end. Tokens that never came are no
    wrong ones, but a problem."""

    problems: tuple[str, ...]
    wrong_tokens: int


def reference_of(events: Sequence[GenerationEvent]) -> Reference:
    """The reference of an undisturbed stream. Raises ValueError when it is no whole answer."""
    started = [event for event in events if isinstance(event, Started)]
    tokens = [event for event in events if isinstance(event, Token)]
    ends = [event for event in events if isinstance(event, Finished)]
    if len(started) != 1 or len(ends) != 1:
        raise ValueError(
            f"the undisturbed stream began {len(started)} times and ended {len(ends)} times"
        )
    text = "".join(token.text for token in tokens) + ends[0].text
    ids, logprobs = tuple(token.token for token in tokens), tuple(token.logprob for token in tokens)
    reference = Reference(started[0].prompt_tokens, ids, text, ends[0].reason, logprobs)
    problems = check(events, reference).problems
    if problems:
        raise ValueError(f"the undisturbed stream is wrong itself: {'; '.join(problems)}")
    return reference


def check(
    events: Sequence[GenerationEvent],
    reference: Reference,
    *,
    whole: bool = True,
    slack: float = 0.0,
) -> Verdict:
    """Compare a stream with its reference. Unless it must be `whole`, it may end anywhere, so far
    without a fault.

    Log-probabilities must be the reference's bit for bit, or within `slack` of them.
    """
    problems = list(_order(events, whole))
    for event in events:
        if isinstance(event, Started) and event.prompt_tokens != reference.prompt:
            problems.append("the prompt's tokens are others")
    wrong, found = _tokens(
        [event for event in events if isinstance(event, Token)], reference, whole, slack
    )
    problems += found
    problems += _end(events, reference)
    if not problems and not reference.text.startswith(streamed := _text(events)):
        problems.append(
            f"the text differs within its {len(streamed)} characters, though the tokens are right"
        )
    if not problems and whole and len(_text(events)) != len(reference.text):
        problems.append("the text is too short, though the tokens are right")
    return Verdict(tuple(problems), wrong)


def _order(events: Sequence[GenerationEvent], whole: bool) -> list[str]:
    problems = []
    begins = [number for number, event in enumerate(events) if isinstance(event, Started)]
    ends = [number for number, event in enumerate(events) if isinstance(event, Finished)]
    if begins not in ([0], []) or (whole and not begins):
        problems.append(
            f"it began {len(begins)} times, as event {begins}; once, as event 0, is right"
        )
    if ends not in ([len(events) - 1], []) or (whole and not ends):
        problems.append(
            f"it ended {len(ends)} times, as event {ends} of {len(events)}; once, at the end, is "
            "right"
        )
    return problems


def _tokens(
    tokens: Sequence[Token], reference: Reference, whole: bool, slack: float
) -> tuple[int, list[str]]:
    """How many are wrong, and the first of each kind of fault."""
    problems: dict[str, str] = {}
    wrong, expected = 0, len(reference.prompt)
    for token in tokens:
        number = token.position - len(reference.prompt)
        if token.position < expected:
            problems.setdefault("repeated", f"token {number} was repeated or came late")
            wrong += 1
            continue
        if token.position > expected:
            problems.setdefault(
                "lost", f"tokens {expected - len(reference.prompt)} to {number - 1} were lost"
            )
        expected = token.position + 1
        if number >= len(reference.tokens):
            problems.setdefault(
                "beyond", f"token {number} is beyond the reference's {len(reference.tokens)}"
            )
            wrong += 1
        elif token.token != reference.tokens[number]:
            problems.setdefault("changed", f"token {number} is another than the reference's")
            wrong += 1
        elif not abs(token.logprob - (right := reference.logprobs[number])) <= slack:
            problems.setdefault(
                "likelier",
                f"token {number} has log-probability {token.logprob!r}, {right!r} is right",
            )
    came = expected - len(reference.prompt)
    if whole and came < len(reference.tokens):
        problems.setdefault("short", f"{came} of {len(reference.tokens)} tokens came")
    return wrong, list(problems.values())


def _end(events: Sequence[GenerationEvent], reference: Reference) -> list[str]:
    problems = []
    for event in events:
        if not isinstance(event, Finished):
            continue
        if event.reason is not reference.reason:
            problems.append(f"it ended by {event.reason}, the reference by {reference.reason}")
        counts = (event.prompt_token_count, event.new_token_count)
        if counts != (len(reference.prompt), len(reference.tokens)):
            problems.append(
                f"its end counts {counts} tokens, {len(reference.prompt), len(reference.tokens)} "
                "are right"
            )
    return problems


def _text(events: Sequence[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token | Finished))
