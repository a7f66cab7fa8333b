"""The samplers of a stage's requests, the tokens of a step, and the log-probabilities of a prompt's
own tokens.

A token's choice itself is in `edgeshard_agent.ops`. Prompts are scored a slice of positions at a
time, of whose logits little is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import (
    PROMPT_LOGPROBS_POSITIONS,
    Guide,
    PromptLogprobs,
    Sampling,
    TokenLogprob,
)
from edgeshard.domain.requests.step import GuideFailure, SampledToken, StepResult, Targets
from edgeshard_agent.guides.guides import Guided, GuideError, Guides
from edgeshard_agent.ops.sampling import RequestSampler, require_finite, sample_rows
from edgeshard_agent.ops.sampling_reference import LikelyTokens

Wanted = tuple[int, int]
"""A request and the position that a token is for."""
PATIENCE_S = 0.002
"""How long a step waits for masks in all. Most are there before their step is; a round through the
stages takes longer than a cheap one. The same limit, in total, holds for the forced tokens after
its tokens, which may save such rounds."""


class Sampler:
    """The samplers of the last stage's requests, and the matchers of those with a guide."""

    def __init__(self, vocab_size: int, guides: Guides | None = None) -> None:
        self._vocab_size = vocab_size
        self._guides = guides
        self._requests: dict[int, RequestSampler] = {}
        self._guided: dict[int, Guided | None] = {}
        """None if the model has no tokenizer."""
        self._late: dict[Wanted, torch.Tensor] = {}
        """Logits [vocab] of tokens whose guides do not know yet."""
        self.most_forced = 0
        """How many forced tokens of a guide the head takes as guesses; 0 if it guesses none."""

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def check(
        self, sampling: Sampling, seen_tokens: Sequence[int], answer: Sequence[int] = ()
    ) -> None:
        """Raise InvalidArgumentError for parameters out of range or a token that is not in the
        vocabulary."""
        sampling.validate()
        biased = [token for token, _ in sampling.logit_bias]
        for name, tokens in (
            ("seen_tokens", seen_tokens),
            ("answer_tokens", answer),
            ("logit_bias", biased),
        ):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
                raise InvalidArgumentError(
                    f"{name} holds an id outside the vocabulary of {self._vocab_size}", field=name
                )

    def open(
        self,
        request: int,
        sampling: Sampling,
        seen_tokens: Sequence[int],
        answer: Sequence[int] = (),
    ) -> None:
        """`seen_tokens` are the tokens that a repetition penalty counts; `answer` is the request's
        answer so far, as far as other penalties or a guide go by it."""
        self._requests[request] = RequestSampler(sampling, seen_tokens, self._vocab_size, answer)

    def open_guide(self, request: int, guide: Guide, answer: Sequence[int], party: int = 0) -> None:
        """The request's answer has these tokens, and continues as its guide allows. `party` is the
        requester; if it is 0, no token may be late."""
        self._guided[request] = (
            None
            if self._guides is None
            else self._guides.open(guide, answer, party, self.most_forced)
        )

    def close(self, request: int) -> None:
        self._requests.pop(request, None)
        guided = self._guided.pop(request, None)
        if guided is not None:
            guided.close()
            for place in [place for place in self._late if place[0] == request]:
                del self._late[place]

    def close_all(self) -> None:
        """Forget every request."""
        for request in list(self._requests):
            self.close(request)

    def retire(self) -> None:
        """Forget every request and end the guides: nothing is sampled any more."""
        self.close_all()
        if self._guides is not None:
            self._guides.close()

    def top_logprobs(self, request: int) -> int:
        """The number of likeliest tokens that a request asked for."""
        return self._requests[request].sampling.top_logprobs

    @property
    def has_late(self) -> bool:
        """Whether a request's logits wait here for its guide's bans."""
        return bool(self._late)

    def draw_behind_guesses(
        self,
        logits: torch.Tensor | None,
        row_places: Sequence[Wanted],
        assumed: Sequence[int | None],
    ) -> StepResult:
        """As `draw`, but a row's own token may be `assumed`: a guess of the token that the previous
        row draws.

        A row after guesses counts only if all of them equal the drawn tokens. Then its result
        equals the one without guessing, and so do the counts of penalties and guides. The first row
        of a request has no guess, and the others follow it. One whose guide does not know yet, or
        leads nowhere, is left for the next step.
        """
        first = [row for row, token in enumerate(assumed) if token is None]
        if logits is None or len(first) == len(assumed):
            return self._with_forced(self.draw(logits, row_places))
        result = self.draw(logits[first], [row_places[row] for row in first])
        drawn = {(token.request, token.position): token.token for token in result.tokens}
        tokens = [*result.tokens]
        until_s = time.monotonic() + PATIENCE_S
        while rows := [
            row
            for row in self._confirmed(row_places, assumed, drawn)
            if self._knows(row_places[row], until_s)
        ]:
            more = self.draw(logits[rows], [row_places[row] for row in rows], with_late=False)
            drawn = {(token.request, token.position): token.token for token in more.tokens}
            tokens += more.tokens
        return self._with_forced(replace(result, tokens=tuple(tokens)))

    def _with_forced(self, result: StepResult) -> StepResult:
        """The same, with the tokens that guides force after these tokens, if the guides know them
        soon."""
        if not (self.most_forced and self._guided):
            return result
        until_s, forced = time.monotonic() + PATIENCE_S, dict[int, tuple[int, ...]]()
        for request in {token.request for token in result.tokens}:
            guided = self._guided.get(request)
            if guided is not None and (tokens := guided.forced(until_s - time.monotonic())):
                forced[request] = tokens
        return replace(result, forced=forced)

    @staticmethod
    def _confirmed(
        row_places: Sequence[Wanted], assumed: Sequence[int | None], drawn: Mapping[Wanted, int]
    ) -> Iterator[int]:
        """The rows whose own token equals the one just drawn."""
        for row, ((request, position), token) in enumerate(zip(row_places, assumed, strict=True)):
            if token is not None and drawn.get((request, position - 1)) == token:
                yield row

    def _knows(self, place: Wanted, until_s: float) -> bool:
        """Whether nothing keeps a request from having another token in this step."""
        guided = self._guided.get(place[0])
        return guided is None or guided.is_due(until_s - time.monotonic())

    def draw(
        self, logits: torch.Tensor | None, row_places: Sequence[Wanted], with_late: bool = True
    ) -> StepResult:
        """A token for each (request, position), from its row of `logits` [R, vocab], and for late
        ones.

        Tokens that guides ban are taken from the rows first. A row whose guide does not know yet
        waits here; those that do are left out unless `with_late`. Raises InternalError when a row
        has no finite largest value: the model's arithmetic broke.
        """
        if (
            logits is not None
            and not (self._late and with_late)
            and not any(request in self._guided for request, _ in row_places)
        ):
            return StepResult(self._choose(logits, row_places))
        rows: list[torch.Tensor] = []
        places: list[Wanted] = []
        if logits is not None:
            # before tokens are taken away: a row without any is then the guide's fault
            require_finite(logits)
            rows, places = list(logits), list(row_places)
        pending = self._wait_for_guides(rows, places) if with_late else ()
        failures = tuple(self._take_banned(rows, places))
        if not rows:
            return StepResult(guide_failures=failures, pending=pending)
        # Unchanged if no row was added or removed: a copy takes as long as a choice.
        chosen_from = (
            logits if logits is not None and places == list(row_places) else torch.stack(rows)
        )
        tokens = self._choose(chosen_from, places)
        for token in tokens:
            guided = self._guided.get(token.request)
            if guided is not None:
                guided.advance(token.token)
        return StepResult(tokens, guide_failures=failures, pending=pending)

    def _wait_for_guides(self, rows: list[torch.Tensor], places: list[Wanted]) -> tuple[int, ...]:
        """Put rows aside whose guides do not know yet, and add rows put aside whose guides do; the
        requests put aside."""
        until_s, pending = time.monotonic() + PATIENCE_S, []
        for index in reversed(range(len(rows))):
            guided = self._guided.get(places[index][0])
            if (
                guided is None
                or not guided.may_be_late
                or guided.is_due(until_s - time.monotonic())
            ):
                continue
            self._late[places[index]] = rows[index].clone()
            pending.append(places[index][0])
            del rows[index], places[index]
        for place in [place for place in self._late if place[0] not in pending]:
            guided = self._guided[place[0]]
            if guided is None or guided.is_due():
                rows.append(self._late.pop(place))
                places.append(place)
        return tuple(pending)

    def _take_banned(
        self, rows: list[torch.Tensor], places: list[Wanted]
    ) -> Iterator[GuideFailure]:
        """Take from each row the tokens that its request's guide bans; rows with no token then are
        left out."""
        for index in reversed(range(len(rows))):
            row, request = rows[index], places[index][0]
            if request not in self._guided:
                continue
            why = self._ban(row, self._guided[request])
            if why:
                yield GuideFailure(request, why)
                del rows[index], places[index]

    @staticmethod
    def _ban(row: torch.Tensor, guided: Guided | None) -> str:
        """The reason why a guide leads to no token; empty if it leads to one."""
        if guided is None:
            return "the model was added without a tokenizer.json"
        try:
            banned = torch.from_numpy(guided.banned())
        except GuideError as error:
            return str(error)
        row.masked_fill_(banned.to(row.device), -math.inf)
        return (
            ""
            if bool(torch.isfinite(row.amax()))
            else "the model gives no token that may follow any probability"
        )

    def _choose(
        self, logits: torch.Tensor, row_places: Sequence[Wanted]
    ) -> tuple[SampledToken, ...]:
        samplers = [self._requests[request] for request, _ in row_places]
        if not logits.is_cpu and all(sampler.is_plain_greedy for sampler in samplers):
            require_finite(logits)
            tokens = logits.argmax(dim=-1).tolist()
            return tuple(
                SampledToken(*place, token) for place, token in zip(row_places, tokens, strict=True)
            )
        choices = sample_rows(logits.cpu(), samplers, [position for _, position in row_places])
        for sampler, row in zip(samplers, choices, strict=True):
            sampler.note(row.token)
        return tuple(
            SampledToken(*place, row.token, row.logprob, _allowed(row.top))
            for place, row in zip(row_places, choices, strict=True)
        )


def _allowed(top: LikelyTokens) -> tuple[TokenLogprob, ...]:
    """The tokens that a guide does not ban."""
    return tuple(TokenLogprob(token, logprob) for token, logprob in top if logprob > -math.inf)


SLICE_BYTES = 32 << 20
"""Limit of a slice's logits in fp32, which no plan counts: a vocabulary of 150,000 tokens has
slices of 55 positions.
"""
LEAST_POSITIONS = 16

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [R, width] to logits [R, vocab]."""


def slice_positions(vocab_size: int) -> int:
    """The number of positions that are scored at a time."""
    return min(PROMPT_LOGPROBS_POSITIONS, max(LEAST_POSITIONS, SLICE_BYTES // (4 * vocab_size)))


def score(
    head: Head, hidden: torch.Tensor, targets: Targets, top_count: int, vocab_size: int
) -> Iterator[PromptLogprobs]:
    """The targets with the `top_count` likeliest tokens in place of each, in slices.

    `hidden` [len(targets.tokens), width] are the states in front of them. Raises InternalError if a
    row of logits has no finite largest value.
    """
    size = slice_positions(vocab_size)
    for begin in range(0, len(targets.tokens), size):
        tokens = targets.tokens[begin : begin + size]
        logits = head(hidden[begin : begin + size]).float()
        require_finite(logits)
        sums = logits.logsumexp(dim=-1, keepdim=True)
        logprobs = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - sums
        yield PromptLogprobs(
            targets.position + begin,
            tuple(logprobs.squeeze(1).tolist()),
            _likeliest(logits, sums, top_count),
        )


def _likeliest(
    logits: torch.Tensor, sums: torch.Tensor, count: int
) -> tuple[tuple[TokenLogprob, ...], ...]:
    if count == 0:
        return ((),) * len(logits)
    values, tokens = logits.topk(min(count, logits.shape[1]), dim=-1)
    rows = zip(tokens.tolist(), (values - sums).tolist(), strict=True)
    return tuple(tuple(map(TokenLogprob, *row)) for row in rows)
