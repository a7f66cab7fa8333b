"""The steps in flight, and when the next may begin. Pure; `spread` decides how decodes share
micro-batches.

A micro-batch has no list of members: it is whatever one step carries. Requests whose tokens
returned together run together again. A step takes at most an equal share of all decoding requests.
So a micro-batch that grew too large leaves some to the next one, and a new request joins the first
micro-batch with room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.requests.step import (
    STEP_TOKENS,
    GuessedTokens,
    SampledToken,
    Span,
    StepResult,
    Targets,
)
from edgeshard_agent.scheduler import sequence as sequences
from edgeshard_agent.scheduler.scoring import (
    check_likeliest,
    check_logprob,
    check_scores,
    check_token,
    exceeds_top,
    targets_by_request,
)

MAX_MICRO_BATCH = STEP_TOKENS // 2
"""Decodes leave half of a step to prompts."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The limits of the placement: `micro_batch` requests (b) in each of `micro_batches` decode
    steps (m) in flight.

    `window` is the most steps in flight, prompts' steps included. `fixed` m are used even if others
    would be quicker. Otherwise m is chosen at run time, with as many decodes in a step as there are
    requests. It is at most the placement's m or, if it is `open`, the window. Steps go in groups of
    up to `sweep`, for each of which stages that stream weights read them once.
    """

    mode: Mode
    window: int
    micro_batch: int
    micro_batches: int
    fixed: bool = False
    open: bool = False
    sweep: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "micro_batch", "micro_batches", "sweep"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; it must be 1 or more", field=name
                )

    @property
    def places(self) -> int:
        """Requests that may run at once."""
        return self.micro_batch * self.micro_batches

    @property
    def most_micro_batches(self) -> int:
        return self.window if self.open else self.micro_batches

    @property
    def most_decodes(self) -> int:
        """The most decodes of one step."""
        return min(MAX_MICRO_BATCH, self.places) if self.open else self.micro_batch


@dataclass(frozen=True, slots=True)
class Owed:
    """The parts that a step's result must bring: the position of each request's token, and the
    prompts' tokens to score. Behind that token come others, as far as the `guesses` of them were
    right.

    After it, the requests of `read` have been read up to these positions and bring no token yet.
    The last stage has forgotten the requests of `frees`.
    """

    tokens: Mapping[int, int]
    targets: Mapping[int, Targets]
    read: Mapping[int, int]
    frees: tuple[int, ...] = ()
    guesses: GuessedTokens = field(default_factory=dict)
    is_alone: bool = False
    """Whether it contains only one decoding request, and no other request needs its rows."""

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        guesses: GuessedTokens,
        frees: tuple[int, ...] = (),
        *,
        is_alone: bool = False,
    ) -> Owed:
        tokens = {span.request: span.certain_position for span in spans if span.sample}
        read = {span.request: span.end_position for span in spans if not span.sample}
        return cls(tokens, targets_by_request(spans), read, frees, guesses, is_alone)

    def first_tokens(self, tokens: Iterable[SampledToken]) -> list[SampledToken]:
        """All but those that follow a token of their request that was guessed."""
        firsts: list[SampledToken] = []
        newest: dict[int, SampledToken] = {}
        for sampled in tokens:
            before, guesses = newest.get(sampled.request), self.guesses.get(sampled.request, ())
            place = sampled.position - self.tokens.get(sampled.request, 0) - 1
            follows = (
                before is not None
                and before.position == sampled.position - 1
                and 0 <= place < len(guesses)
            )
            if not (follows and before is not None and guesses[place] == before.token):
                firsts.append(sampled)
            newest[sampled.request] = sampled
        return firsts


class Flight:
    """The steps in flight, oldest first, and whether another may begin."""

    def __init__(self, batching: Batching) -> None:
        self._mode = batching.mode
        self.window = 1 if batching.mode is Mode.SEQUENTIAL else batching.window
        self._decodes: deque[bool] = deque()
        self._owed: deque[Owed] = deque()
        self._round_over = False
        self._sweep = batching.sweep
        self._most_sweeps = max(1, self.window // batching.sweep)
        self._sweeps: deque[int] = deque()
        """Steps of each sweep in flight that are not back."""

    def __len__(self) -> int:
        return len(self._decodes)

    @property
    def decode_steps(self) -> int:
        """Steps in flight that carry decodes: one for each micro-batch."""
        return sum(self._decodes)

    @property
    def has_room(self) -> bool:
        return len(self) < self.window and not self._round_over

    @property
    def sweep(self) -> int:
        """Steps that the next sweep may have; 0 while the sweeps in flight leave no room for
        another."""
        if self._sweep == 1:
            return 1
        return self._sweep if len(self._sweeps) < self._most_sweeps else 0

    def swept(self, steps: int) -> None:
        """Note that the newest `steps` steps are a sweep."""
        if self._sweep > 1:
            self._sweeps.append(steps)

    def begin(self, decodes: bool, expectation: Owed) -> None:
        self._decodes.append(decodes)
        self._owed.append(expectation)

    def guessed(self, index: int, guesses: GuessedTokens) -> None:
        """Note the guesses of a step in flight, the oldest being at index 0."""
        self._owed[index] = replace(self._owed[index], guesses=guesses)

    def end(self) -> Owed:
        """Take the oldest step back, and return its outstanding parts. With bubbles the next begins
        only when all are back.
        """
        self._decodes.popleft()
        if self._sweeps:
            self._sweeps[0] -= 1
            if not self._sweeps[0]:
                self._sweeps.popleft()
        self._round_over = self._mode is Mode.BUBBLES and bool(self._decodes)
        return self._owed.popleft()


def check_owed(
    step: int,
    expectation: Owed,
    result: StepResult,
    running: Mapping[int, sequences.Sequence],
    late: Mapping[int, int],
    vocab_size: int,
) -> None:
    """Raise InternalError unless a result has everything that its step was formed for.

    Each token is below `vocab_size`, and each log-probability is finite.

    Nothing may be missing but of a request that runs no more, or begins again: it would be waited
    for forever. If a guide failed, its error or a pending mark replaces the token of its request.
    Tokens of `late`, requests and positions, may come with any step. An additional token must
    follow a guess that equals the token before it.
    """
    tokens, failures = expectation.first_tokens(result.tokens), result.guide_failures
    due = {**late, **expectation.tokens}
    came = {sampled.request: sampled.position for sampled in tokens}
    came |= {failed.request: due.get(failed.request, -1) for failed in failures}
    came |= {number: expectation.tokens.get(number, -1) for number in result.pending}
    if (
        len(came) < len(tokens) + len(failures) + len(result.pending)
        or not came.items() <= due.items()
    ):
        raise InternalError(
            f"result of step {step} has a token that was not requested", reason="WRONG_RESULT"
        )
    missing = sum(number in running for number in expectation.tokens.keys() - came.keys())
    if missing:
        raise InternalError(
            f"result of step {step} lacks {missing} of its tokens", reason="WRONG_RESULT"
        )
    for sampled in result.tokens:
        check_token(step, sampled.token, vocab_size)
        check_logprob(step, sampled.logprob)
        check_likeliest(step, sampled.top, vocab_size)
        if sampled.top and exceeds_top(running, sampled.request, len(sampled.top)):
            raise InternalError(
                f"result of step {step} has a token with too many likeliest ones",
                reason="WRONG_RESULT",
            )
    for forced in result.forced.values():  # the next step runs them as draft tokens
        for token in forced:
            check_token(step, token, vocab_size)
    check_scores(step, expectation.targets, result.prompt_logprobs, running, vocab_size)
