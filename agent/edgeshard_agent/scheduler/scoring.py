"""The log-probabilities of a prompt that a step requests, and the check that its result contains
them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.generation import TokenLogprob
from edgeshard.domain.requests.step import Span, SpanLogprobs, Targets
from edgeshard_agent.scheduler import sequence as sequences


def is_unscored(sequence: sequences.Sequence) -> bool:
    """Whether log-probabilities of its prompt are wanted that have not come yet."""
    return sequence.generation.prompt_logprobs and sequence.scored < sequence.prompt_count


def targets_of(sequence: sequences.Sequence, first: int, end: int) -> Targets | None:
    """The tokens of the prompt that the positions [first, end) score: each scores the token after
    it.

    Scores that came before a preemption, or from another head, are not asked for again.
    """
    if not is_unscored(sequence):
        return None
    position, behind = max(first + 1, sequence.scored), min(end + 1, sequence.prompt_count)
    return Targets(position, tuple(sequence.tokens[position:behind])) if position < behind else None


def targets_by_request(spans: Sequence[Span]) -> dict[int, Targets]:
    return {span.request: span.targets for span in spans if span.targets is not None}


def exceeds_top(running: Mapping[int, sequences.Sequence], request: int, count: int) -> bool:
    """Whether a running request wants fewer likeliest tokens at a position than `count`."""
    sequence = running.get(request)
    return sequence is not None and count > sequence.generation.sampling.top_logprobs


def check_likeliest(step: int, likeliest: Iterable[TokenLogprob], vocab_size: int) -> None:
    """Raise InternalError unless these are tokens of the vocabulary with log-probabilities that are
    finite."""
    for entry in likeliest:
        check_token(step, entry.token, vocab_size)
        check_logprob(step, entry.logprob)


def check_token(step: int, token: int, vocab_size: int) -> None:
    """Raise InternalError unless a token of a step's result is in the vocabulary.

    The first stage would refuse it with the next step. Its node would then fail because of the last
    stage's fault.
    """
    if not 0 <= token < vocab_size:
        raise InternalError(
            f"result of step {step} has token {token}, outside the vocabulary of {vocab_size}",
            reason="WRONG_RESULT",
        )


def check_logprob(step: int, logprob: float) -> None:
    """Raise InternalError unless a log-probability is finite: no JSON holds another."""
    if not isfinite(logprob):
        raise InternalError(
            f"result of step {step} has a log-probability that is not finite", reason="WRONG_RESULT"
        )


def check_scores(
    step: int,
    expected_targets: Mapping[int, Targets],
    came: Sequence[SpanLogprobs],
    running: Mapping[int, sequences.Sequence],
    vocab_size: int,
) -> None:
    """Raise InternalError unless a result scores the targets of its step, each once and in order,
    with tokens of the vocabulary and finite numbers.

    Scores of a request that runs no more, or begins again, may be missing.
    """
    ends = {request: targets.position for request, targets in expected_targets.items()}
    for item in came:
        scores = item.prompt_logprobs
        top = max(map(len, scores.top), default=0)
        is_owed = ends.get(item.request) == scores.position and len(scores.top) == len(
            scores.logprobs
        )
        if not is_owed or exceeds_top(running, item.request, top):
            raise InternalError(
                f"result of step {step} has log-probabilities that were not requested",
                reason="WRONG_RESULT",
            )
        for logprob in scores.logprobs:
            check_logprob(step, logprob)
        for likeliest in scores.top:
            check_likeliest(step, likeliest, vocab_size)
        ends[item.request] = scores.end
    for request, targets in expected_targets.items():
        behind = targets.position + len(targets.tokens)
        if ends[request] > behind or (ends[request] < behind and request in running):
            raise InternalError(
                f"result of step {step} lacks log-probabilities", reason="WRONG_RESULT"
            )
