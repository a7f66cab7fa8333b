"""The draft at work: a smaller model, whole in this process, that guesses tokens for the head's
steps.

It runs on the compute thread before a step, so that its guesses take no turn of the event loop.
Each guess is drawn as the token itself will be: by the request's own sampling and with the same
random numbers. If both models agree, they draw the same token. Nothing depends on a guess but time.
(docs/speculation.md#a-draft)
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from edgeshard.domain.requests.step import DRAFT_TOKENS, GuessedTokens, StepPlan
from edgeshard_agent.model.draft_steps import DraftSteps
from edgeshard_agent.scheduler.drafting import (
    FIRST_GUESSES,
    DraftAsk,
    Prices,
    Trust,
    goes_on,
    is_kept,
)

MOST_NEW = 2
"""Tokens that are read before the first guess if all guesses before were right: more take longer
than a step."""


@dataclass(slots=True)
class _Known:
    """A request that the draft reads along with, in the KV memory of one place.

    It has read `certain` tokens of the request, then `assumed` tokens that it guessed.
    """

    place: int
    certain: int = 0
    assumed: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    """The newest ones, which a step has, each with its probability under the draft."""
    probabilities: list[float] = field(default_factory=list)
    token_count: int = 0
    """The request's tokens when they were made."""
    trust: Trust = field(default_factory=Trust)
    answered_s: float | None = None
    """When the step with them began; None if the request had other steps since, or none yet."""

    def read_of(self, tokens: Sequence[int]) -> int:
        """How many of these tokens it has read; the last one is still to be read."""
        read = self.certain
        for assumed in self.assumed:
            if read >= len(tokens) or tokens[read] != assumed:
                break
            read += 1
        return min(read, len(tokens) - 1)


class Drafter:
    """A draft for as many requests at once as `steps` has `places`; the one that was asked for
    longest ago gives its place to another. All calls are made on the compute thread.

    It guesses tokens below `vocab_size`, the vocabulary of the model that it guesses for. `now` is
    a steady clock in seconds.
    """

    def __init__(
        self,
        steps: DraftSteps,
        places: int,
        vocab_size: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps = steps
        self._places = places
        self._vocab_size = vocab_size
        self._now = now
        self._free = list(range(places))
        self._known: OrderedDict[int, _Known] = OrderedDict()
        """By request; the least recently requested one first."""
        self._drafting_s = 0.0
        """The time of the newest guesses."""
        self.prices = Prices()

    def follow(self, plan: StepPlan, asks: Sequence[DraftAsk]) -> None:
        """A step is about to run. The requests that it frees are forgotten here, too."""
        for request in plan.frees:
            self._forget(request)
        requests = {ask.request for ask in asks}
        for span in plan.spans:
            if (
                span.request not in requests
                and (state := self._known.get(span.request)) is not None
            ):
                state.answered_s = None

    @torch.inference_mode()
    def guess(self, asks: Sequence[DraftAsk]) -> GuessedTokens:
        """The guesses that follow the tokens of each request, in the order of the tokens. Empty if
        guessing does not pay, or while the draft still reads the request."""
        began_s, asks = self._now(), asks[: self._places]
        drafts = {
            ask.request: tuple(guesses) for ask in asks if (guesses := self._of_one(ask, began_s))
        }
        ended_s = self._now()
        for ask in asks:
            if (state := self._known.get(ask.request)) is not None:
                state.token_count, state.answered_s = len(ask.tokens), ended_s
        self._drafting_s = ended_s - began_s
        return drafts

    def reset(self) -> None:
        """Forget every request."""
        for request in list(self._known):
            self._forget(request)

    def release(self) -> None:
        """Give the memory back. It guesses nothing any more."""
        self._steps.release()

    def _of_one(self, ask: DraftAsk, now_s: float) -> list[int]:
        room = self._steps.longest - len(ask.tokens) + 1
        if room < 1:
            self._forget(ask.request)
            return []
        state = self._known.get(ask.request) or self._taken(ask.request)
        self._known.move_to_end(ask.request)
        self._learn(state, ask, now_s)
        state.guesses, state.probabilities = [], []
        if (
            state.trust.begins(self.prices)
            and max(ask.tokens[state.certain :], default=0) < self._steps.vocab_size
        ):
            self._draw(ask, state, min(ask.most, room))
        return state.guesses

    def _learn(self, state: _Known, ask: DraftAsk, now_s: float) -> None:
        """The guesses before were right, or not."""
        came, right = ask.tokens[state.token_count :], 0
        while right < min(len(state.guesses), len(came)) and state.guesses[right] == came[right]:
            right += 1
        state.trust.noted(state.probabilities, right)
        # With more tokens than one step brings there were steps between that had nothing to do with
        # the draft.
        if state.answered_s is not None and 0 < len(came) <= len(state.guesses) + 1:
            self.prices.passed(
                len(state.guesses), len(came), now_s - state.answered_s, self._drafting_s
            )

    def _draw(self, ask: DraftAsk, state: _Known, most: int) -> None:
        """Draw guesses until no other pays. If it has not read a text yet, it first reads a part of
        it."""
        began_s, tokens = self._now(), ask.tokens
        read = state.read_of(tokens)
        end = min(len(tokens), read + DRAFT_TOKENS)
        state.certain, state.assumed = end, []
        logits = self._steps.logits(state.place, read, tokens[read:end])
        if end < len(tokens):
            return
        # Anew each time: penalties count no guess of the step before.
        sampler, chance = self._steps.sampler(ask.sampling, tokens, ask.prompt_count), 1.0
        while True:
            position = len(tokens) + len(state.guesses)
            token, probability = self._steps.draw(logits, sampler, position)
            chance *= state.trust.chance(probability)
            if not (
                self._takes(ask, state, token, probability, chance) and len(state.guesses) < most
            ):
                break
            sampler.note(token)
            state.assumed.append(token)
            logits = self._steps.logits(state.place, position, [token])
        if end - read <= MOST_NEW:
            self.prices.drew((self._now() - began_s) / (1 + len(state.assumed)))

    def _takes(
        self, ask: DraftAsk, state: _Known, token: int, probability: float, chance: float
    ) -> bool:
        """Add a guess if it pays; return whether to draw another."""
        trust, prices = state.trust, self.prices
        trust.drawn(probability)
        pays = not prices.are_known or trust.is_trial or is_kept(chance, prices)
        if not pays or token in ask.ends or token >= self._vocab_size:
            return False
        state.guesses.append(token)
        state.probabilities.append(probability)
        if trust.is_trial:
            return False
        return (
            goes_on(chance, trust.expected, prices)
            if prices.are_known
            else len(state.guesses) < FIRST_GUESSES
        )

    def _taken(self, request: int) -> _Known:
        """A place for a request that has none."""
        if not self._free:
            self._forget(next(iter(self._known)))
        state = self._known[request] = _Known(self._free.pop())
        self._steps.begin(state.place)
        return state

    def _forget(self, request: int) -> None:
        if (state := self._known.pop(request, None)) is not None:
            self._free.append(state.place)
